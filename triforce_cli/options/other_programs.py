"""Commands as other programs call them, and ours that do the same: for a person who types one of them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from offload.errors import UsageError, quoted_line

HELP = "help"
_OURS = {  # "": the group itself, if it does something alone
    "run": ("chat", "ask", "generate"),
    "list": ("", "models", "ls", "show"),
    "ls": ("models", "show"),
    "ps": ("serve", "models"),
    "stop": ("serve",),
    "server": ("serve",),
    "show": ("models", "info", "ls"),
    "info": ("models", "show", "version"),
    "rm": ("models", "clear", "unset"),
    "remove": ("models", "rm", "clear", "unset"),
    "delete": ("models", "rm", "clear", "unset"),
    "download": ("pull",),
    "create": ("convert",),
    "complete": ("generate",),
    "prompt": ("ask", "generate"),
    "logs": ("log",),
    "history": ("log",),
    "tokenize": ("tokens",),
    "eval": ("score",),
    "get": ("show",),
}


class Group(TyperGroup):
    """A group of commands. An unknown one that other programs have is refused with ours that do the same. An option of
    the group itself before a command, which would not heed it, is refused, too. default: the command of words that do
    not begin with one."""

    default = ""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (ours := self._ours(*args)):
            lines = " or ".join(quoted_line(*ctx.command_path.split(), *name.split()) for name in ours)
            raise UsageError(f"there is no command {args[0]!r} in {ctx.command_path}; try {lines}")
        is_named = args[0] in self.commands or not self.default
        found = super().resolve_command(ctx, args if is_named else [self.default, *args])
        for parameter in self.params:
            source = ctx.get_parameter_source(str(parameter.name))
            if source is not None and source.name == "COMMANDLINE":
                command = f"{ctx.command_path} {args[0]}"
                raise UsageError(f"{parameter.opts[0]} stands before {args[0]}; put it behind {command}")
        return found

    def _ours(self, name: str, *more: str) -> list[str]:
        """The words of the commands in place of `name`; [""] for the group itself."""
        if name == HELP:
            return [f"{more[0]} --help" if more and more[0] in self.commands else "--help"]
        alone = self.invoke_without_command
        found = [ours for ours in _OURS.get(name, ()) if ours in self.commands or (not ours and alone)]
        return found or [""] * (name in _OURS and alone)
