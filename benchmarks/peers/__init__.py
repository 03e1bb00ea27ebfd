"""The same folders in programs that nobody here wrote: do they propose, accept and answer what we do?

One script per peer, all writing their rows of the result `parity-peers`; docs/peers.md says how to install the peers
and where they deviate. Peers are imported or run, never copied, and nothing else of the repository needs them.
"""
