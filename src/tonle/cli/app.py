"""The subcommands of `tonle`, and how each of them ends: exit status 0, 1 (an error), 2 (usage) or 130 (Ctrl-C);
`tonle rollout` has a 3, too.

A subcommand's module is imported when it is called and not before: `tonle --help` must not wait for an HTTP client.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tonle import __version__
from tonle.child.open_files import describe, is_too_many
from tonle.cli.help import plain_help_option, tidy
from tonle.cli.screen import show_error
from tonle.errors import ConfigError, TonleError

_DEBUG_VARIABLE = "TONLE_DEBUG"
_INTERRUPTED = 130  # 128 + SIGINT, what shells report
_BROKEN_PIPE = 141  # 128 + SIGPIPE

_NOT_A_NUMBER = re.compile(r"a valid (number|integer), unable to parse string as an? \1")

# Each is a function of that name and the first line of its help. Its module has the same name, unless it is in _MODULES.
VERBS = {
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "worker": "Serve one pool of workers: embeddings, rerank, speech, images, or a class of your own.",
    "gateway": "Put keys, limits, an audit trail and routing in front of OpenAI-compatible servers.",
    "keys": "Create, list and revoke the API keys of a gateway.",
    "backends": "List, add, change, drain and remove the backends of a running gateway.",
    "ab": "Compare the arms of an A/B experiment, from the audit trail.",
    "audit": "Check, search, export, replay and prune the audit trail.",
    "explain": "Say where the time of one request went.",
    "chat": "Chat with a model in the terminal.",
    "run": "Answer one prompt and exit.",
    "pull": "Download a model, so that it can start without a network later.",
    "quantize": "Write a copy of a model with its weights in 8 or 4 bits.",
    "models": "List the models on this machine: those Tonle downloaded, and those in the Hugging Face cache.",
    "deploy": "Write the documents that run a server on KServe, llm-d, Kubernetes, Docker, RunPod or systemd.",
    "advise": "Size a deployment: precision, GPUs per replica, replicas, limits, each with its reason, checked in simulation.",
    "ray": "Run replicas of `tonle serve` on a Ray cluster: as many as the load needs.",
    "rollout": "Replace the replicas behind a gateway one by one, with no failed request.",
    "top": "Watch a running server: load, latencies, caches, GPU, backends.",
    "bench": "Measure an OpenAI-compatible server: time to first token, time per token, throughput.",
    "profile": "Measure how long the steps of a server take, for `tonle simulate` and `tonle tune`.",
    "simulate": "Say what servers would do under a load: fewest replicas for an SLO, cost, without a server.",
    "tune": "Find settings of a server for your load and your SLO: simulated, measured, and confirmed against the default.",
}
_MODULES = {"backends": "gateway_backends", "pull": "models"}


def _plain(message: str) -> str:
    """A message about a wrong value without the vocabulary of the library that checked it."""
    message = message.removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return _NOT_A_NUMBER.sub(lambda found: "a whole number" if found[1] == "integer" else "a number", message)


class Verbs(TyperGroup):
    """Finds subcommands by name and ends each the same way."""

    def get_help_option(self, ctx: Any) -> Any:
        return plain_help_option(super().get_help_option, ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """As much as the overview needs; `resolve_command` loads the subcommand itself."""
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and (close := difflib.get_close_matches(args[0], VERBS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, close))}?")
        name, _, rest = super().resolve_command(ctx, args)
        verb = load_verb(str(name))
        return name, verb, _one_value_each(rest) if name == "serve" else rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _plain(error.message)
            raise
        except BrokenPipeError as error:
            # The reader of our output has closed it (`tonle run ... | head`). Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_BROKEN_PIPE) from error
        except Exception as error:
            named = _named(error)
            if named is None or os.environ.get(_DEBUG_VARIABLE):
                raise
            show_error(named)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(_INTERRUPTED) from interrupt


def _one_value_each(args: list[str]) -> list[str]:
    """vLLM's `--lora-modules a=x b=y` as `--lora-modules a=x --lora-modules b=y`: an option here takes one value."""
    from tonle.config.vllm import VLLM_FLAGS

    several = {flag.flag for flag in VLLM_FLAGS.values() if flag.many}
    found: list[str] = []
    current = ""  # the flag that the next value belongs to
    for arg in args:
        if arg.startswith("-"):
            current = arg if arg in several else ""
        elif current and found[-1] != current:
            if not ("=" in arg or arg.startswith("{")):  # the model
                current = ""
            else:
                found.append(current)
        found.append(arg)
    return found


def _named(error: Exception) -> TonleError | None:
    """The error to show. None: Python's own says more. Out of descriptors, whatever was opened last is not to blame."""
    if is_too_many(error):
        return ConfigError(describe(error))
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "tonle").partition(".")[0]) != "tonle":
        return ConfigError(
            f"{missing} is not installed, and this needs it: install the whole package (pip install tonle), or use an image that "
            "has it: the gateway's has what a gateway needs and no more"
        )
    return error if isinstance(error, TonleError) else None


def _typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,  # a bug shows Python's own traceback, ready for a report
        **settings,
    )


def load_verb(name: str) -> Any:
    """A subcommand that can be run."""
    verb = getattr(import_module(f"tonle.cli.{_MODULES.get(name, name)}"), name)
    if isinstance(verb, typer.Typer):  # it has subcommands of its own
        return tidy(typer.main.get_command(verb))
    single = _typer()
    single.command(name)(verb)
    return tidy(typer.main.get_command(single))


app = _typer(cls=Verbs, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


def _show_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"tonle {__version__}")
        raise typer.Exit


@app.callback(epilog="[dim]Start here:[/dim]  tonle chat     [dim]Help on a command:[/dim]  tonle serve --help")
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            metavar="",
            help="Show the version and exit.",
            callback=lambda wanted: _show_version(wanted=wanted),
            is_eager=True,
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", metavar="", help="Show where an error came from (also TONLE_DEBUG=1).")
    ] = False,
) -> None:
    """Serve language models and chat with them: an inference engine, an OpenAI-compatible server and a gateway."""
    if debug:
        os.environ[_DEBUG_VARIABLE] = "1"
