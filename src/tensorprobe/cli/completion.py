"""`tensorprobe completion`: a script by which a shell completes verbs, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tensorprobe.cli.options import add_json, say_json
from tensorprobe.terminal import say

_EPILOG = """\
to have it in every new shell:
  bash   tensorprobe completion bash > ~/.local/share/bash-completion/completions/tensorprobe
  zsh    tensorprobe completion zsh > ~/.zfunc/_tensorprobe   (with ~/.zfunc in fpath)
  fish   tensorprobe completion fish > ~/.config/fish/completions/tensorprobe.fish
"""


class Option(NamedTuple):
    """An option of a verb."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    metavar: str = ""


class Command(NamedTuple):
    """A verb, or a verb of a verb, with what may be typed behind it."""

    words: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    verbs: tuple[str, ...]  # its own
    usage: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SCRIPTS), help="bash, zsh or fish")
    add_json(parser, "all verbs and options")


def run(args: argparse.Namespace) -> int:
    commands = list(all_commands())
    if args.json:
        options = [
            {**each._asdict(), "options": [o._asdict() for o in each.options]} for each in commands
        ]
        say_json({"format": 1, "commands": options})
    else:
        say(*_SCRIPTS[args.shell](commands))
    return 0


def all_commands() -> Iterator[Command]:
    """Every verb, from its own parser."""
    from tensorprobe.cli.main import VERBS, build_parser

    yield Command((), "", (), tuple(VERBS))
    for verb, text in VERBS.items():
        for action in build_parser(verb)._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from _commands((verb,), text, action.choices[verb])


def _commands(
    words: tuple[str, ...], text: str, parser: argparse.ArgumentParser
) -> Iterator[Command]:
    inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    options = tuple(_option(each) for each in shown if each.option_strings)
    verbs = tuple(name for action in inner for name in action.choices)
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield Command(words, text, options, verbs, usage)
    for action in inner:
        texts = {each.dest: each.help or "" for each in action._choices_actions}
        for name, each in action.choices.items():
            yield from _commands((*words, name), texts.get(name, ""), each)


def _option(action: argparse.Action) -> Option:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    choices = tuple(str(each) for each in action.choices or ())
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if not metavar and action.nargs != 0:
        metavar = "|".join(choices) if choices else action.dest.upper()
    return Option(tuple(action.option_strings), text, action.nargs != 0, choices, metavar)


# --- scripts ------------------------------------------------------------------------------------


def _bash(commands: list[Command]) -> Iterator[str]:
    yield "# of bash, made by: tensorprobe completion bash"
    yield "_tensorprobe() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '    local command="" word offered=""'
    yield '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield from _which_command(commands)
    yield "    done"
    yield "    COMPREPLY=()"
    yield '    case "$command $before" in'
    for name, option in _with_values(commands):
        pattern = "|".join(f'"{name} {each}"' for each in option.names)
        yield f'        {pattern}) offered="{" ".join(option.choices)}" ;;'
    yield "    esac"
    yield '    if [[ -z $offered && $current == -* ]]; then case "$command" in'
    for each in commands[1:]:
        names = " ".join(name for option in each.options for name in option.names)
        yield f'        "{" ".join(each.words)}") offered="{names}" ;;'
    yield '    esac; elif [[ -z $offered ]]; then case "$command" in'
    for each in commands:
        if each.verbs:
            yield f'        "{" ".join(each.words)}") offered="{" ".join(each.verbs)}" ;;'
    yield "    esac; fi"
    yield '    [[ -n $offered ]] && COMPREPLY=($(compgen -W "$offered" -- "$current"))'
    yield "}"
    yield "complete -o default -F _tensorprobe tensorprobe"


def _zsh(commands: list[Command]) -> Iterator[str]:
    yield "#compdef tensorprobe"
    yield "# of zsh, made by: tensorprobe completion zsh"
    yield "_tensorprobe() {"
    yield '    local command="" word before="${words[CURRENT-1]}"'
    yield "    local -a offered"
    yield "    for word in ${words[2,CURRENT-1]}; do"
    yield from _which_command(commands)
    yield "    done"
    yield '    case "$command $before" in'
    for name, option in _with_values(commands):
        pattern = "|".join(f'"{name} {each}"' for each in option.names)
        yield f"        {pattern}) compadd -- {' '.join(option.choices)}; return ;;"
    yield "    esac"
    yield '    if [[ $PREFIX == -* ]]; then case "$command" in'
    for each in commands[1:]:
        texts = [_quoted(f"{name}:{o.help}") for o in each.options for name in o.names]
        yield f'        "{" ".join(each.words)}") offered=({" ".join(texts)}) ;;'
    yield '    esac; else case "$command" in'
    helps = {each.words: each.help for each in commands}
    for each in commands:
        texts = [_quoted(f"{name}:{helps[(*each.words, name)]}") for name in each.verbs]
        if texts:
            yield f'        "{" ".join(each.words)}") offered=({" ".join(texts)}) ;;'
    yield "    esac; fi"
    yield "    if (( $#offered )); then _describe -o tensorprobe offered; else _files; fi"
    yield "}"
    yield 'if [[ $funcstack[1] == _tensorprobe ]]; then _tensorprobe "$@"'
    yield "else compdef _tensorprobe tensorprobe; fi"


def _fish(commands: list[Command]) -> Iterator[str]:
    yield "# of fish, made by: tensorprobe completion fish"
    helps = {each.words: each.help for each in commands}
    for each in commands:
        inside = " ".join(each.words[:1])
        known = " ".join(each.verbs)
        for name in each.verbs:
            when = "__fish_use_subcommand"
            if inside:
                seen = "__fish_seen_subcommand_from"
                when = f"{seen} {inside}; and not {seen} {known}"
            text = _quoted(helps[(*each.words, name)])
            yield f"complete -c tensorprobe -f -n {_quoted(when)} -a {name} -d {text}"
        when = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in each.words)
        for option in each.options:
            words = ["complete -c tensorprobe", f"-n {_quoted(when)}"]
            kinds = [("l" if name.startswith("--") else "s", name) for name in option.names]
            words += [f"-{kind} {name.lstrip('-')}" for kind, name in kinds]
            if option.choices:
                words.append(f"-x -a {_quoted(' '.join(option.choices))}")
            elif option.takes_value:
                words.append("-r")
            yield " ".join([*words, f"-d {_quoted(option.help)}"])


def _which_command(commands: list[Command]) -> Iterator[str]:
    """The branch of a loop over the words: which verb they have come to."""
    yield '        case "$command $word" in'
    for each in commands[1:]:
        before, name = " ".join(each.words[:-1]), each.words[-1]
        yield f'            "{before} {name}") command="{" ".join(each.words)}" ;;'
    yield "        esac"


def _with_values(commands: list[Command]) -> Iterator[tuple[str, Option]]:
    for each in commands:
        for option in each.options:
            if option.choices:
                yield " ".join(each.words), option


def _quoted(text: str) -> str:
    """In single quotes, which all three shells leave as it is but for quotes and backslashes."""
    plain = text.replace("\\", "").replace("'", "").replace("\n", " ")
    return f"'{plain}'"


_SCRIPTS: dict[str, Callable[[list[Command]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
