"""`paceline chat MODEL --draft-model DRAFTER`: a conversation in the terminal, in this process.

`conversation.py` holds the messages, `chat_loop.py` reads and shows. Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.cli.conversation import Conversation
    from paceline.configuration.chat import ChatRun
    from paceline.configuration.environment import Environment

_NUM_HISTORY_TOKENS = 7168  # room for earlier turns where no context is asked for: 8192 with an answer of the default


def chat(
    context: typer.Context,
    model: options.Target = None,
    system: options.System = None,
    draft_model: options.DraftModel = None,
    spec_tokens: options.SpecTokens = None,
    draft_sample_method: options.DraftSampleMethod = None,
    verify_method: options.VerifyMethod = None,
    draft_length: options.DraftLength = None,
    draft_vocab_size: options.DraftVocabSize = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Largest number of tokens of an answer; 1024 by default.", rich_help_panel=options.SAMPLING),
    ] = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    logit_bias: options.LogitBias = None,
    allowed_token_id: options.AllowedTokenId = None,
    bad_word: options.BadWord = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: options.IgnoreEos = False,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --dry-run: the settings as JSON.", rich_help_panel=options.OUTPUT),
    ] = False,
    config: options.ConfigFile = None,
    set_values: options.SetValues = None,
    dry_run: options.DryRun = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Chat with a target in the terminal, faster with a drafter; /help in it lists the commands."""
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.cli.chat_loop import ChatLoop, InputLines
    from paceline.configuration.chat import ChatRun
    from paceline.configuration.load import load_settings

    run = load_settings(ChatRun, config, set_values or (), options.asked(context, ChatRun))
    if dry_run:
        options.show_settings(run, as_json=as_json)
        return
    if as_json:
        raise ConfigError("--json shows settings, with --dry-run alone", hint="/save FILE, in the chat")
    conversation = open_conversation(run, environment)
    lines = InputLines()
    loop = ChatLoop(
        conversation,
        lines.next_message,
        is_terminal=lines.is_terminal,
        is_quiet=session.verbosity < 0,
        has_color=session.color,
    )
    raise typer.Exit(loop.run())


def open_conversation(run: ChatRun, environment: Environment) -> Conversation:
    """Load the models and make the engine that answers.

    Raises:
        PacelineError: a model cannot be found, read or combined, or the target has no chat template.
    """
    from paceline.cli import running
    from paceline.cli.conversation import Conversation

    sampling = running.ruled_sampling_of(run)
    models = running.load_models(run, environment)
    engine = running.make_engine(run, models, num_prompt_tokens=_NUM_HISTORY_TOKENS)
    return Conversation(engine, models.target.tokenizer, sampling, system=run.system)
