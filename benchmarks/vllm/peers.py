"""vLLM's times beside ours: reads what `stepping.py` wrote, and puts it into rows of `gpu-steps`.

python -m benchmarks.vllm.peers OUT/gpu-steps.json OUT/vllm/vllm-steps.jsonl --fact "the peer on another GPU"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Peers = Mapping[tuple[str, str, int, str], Mapping[str, Any]]  # by shape, kind, batch and weights


def read_peers(path: Path | None) -> Peers:
    """The peer's times from lines of JSON; a last line that was cut short is left out, as are counters.

    Lines that say nothing of weights are of vLLM's own dummy ones: they were written before there were others.

    Args:
        path: None, or of a file that is not there, gives none.
    """
    found: dict[tuple[str, str, int, str], Mapping[str, Any]] = {}
    if path is None or not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "ms" in row:
            found[row["shape"], row["kind"], row["batch"], row.get("weights", "dummy")] = row
    return found


def peer_columns(peers: Peers, row: Mapping[str, Any]) -> dict[str, object]:
    """What a row says of the peer: nothing where that was not measured."""
    peer = peers.get((row["shape"], row["kind"], row["batch"], row.get("weights", "normal")), {})
    ours, theirs = row.get("ours_ms"), peer.get("ms")
    ratio = theirs / ours if ours and theirs else None
    return {"peer": peer.get("peer"), "peer_ms": theirs, "peer_over_ours": ratio}


def join_peers(result: Path, peers: Peers, *facts: str) -> int:
    """Put the peer's times into a result file that was written before they were known.

    Args:
        result: of `gpu_steps`.
        peers: from `read_peers`.
        facts: what is to be said of the machine besides, once.

    Returns:
        Rows that have one now.
    """
    from benchmarks.results import rounded, write_result

    if not result.exists():
        return 0
    found = json.loads(result.read_text(encoding="utf-8"))
    found["rows"] = [{**row, **rounded(peer_columns(peers, row))} for row in found["rows"]]
    new = [fact for fact in facts if fact not in found["machine"]]
    found["machine"] = ", ".join([found["machine"], *new])
    write_result(result.parent, found)
    return sum(row["peer_ms"] is not None for row in found["rows"])


def main(arguments: Sequence[str]) -> int:
    """Join two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="gpu-steps.json, which is written again")
    parser.add_argument("peers", type=Path, help="lines of benchmarks.vllm.stepping")
    parser.add_argument("--fact", action="append", default=[], help="to be said of the machine; repeatable")
    options = parser.parse_args(arguments)
    count = join_peers(options.result, read_peers(options.peers), *options.fact)
    print(f"{count} rows of {options.result.name} have the peer's times")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
