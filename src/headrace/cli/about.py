"""Commands about the program itself: its version, its help, and completion in a shell."""

import click
from click.shell_completion import get_completion_class

from headrace_common.version import __version__


@click.command("version", short_help="Show the version.")
def version() -> None:
    """Show the version."""
    click.echo(__version__)


@click.command("help", short_help="Show the help of a command.")
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def show_help(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, or the list of all commands.

    \b
    headrace help serve
    headrace help models rm
    """
    at = context.find_root()
    for word in words:
        verb = at.command.get_command(at, word) if isinstance(at.command, click.Group) else None
        if verb is None:
            raise click.UsageError(
                f"There is no command {' '.join(words)!r}; `headrace help` lists all commands."
            )
        at = click.Context(verb, parent=at, info_name=word)
    click.echo(at.get_help())


@click.command("completion", short_help="Print a script that completes words in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, flags and choices.

    \b
    echo 'eval "$(headrace completion bash)"' >> ~/.bashrc
    echo 'eval "$(headrace completion zsh)"' >> ~/.zshrc
    headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    script = get_completion_class(shell)
    assert script is not None
    root = context.find_root().command
    click.echo(script(root, {}, "headrace", "_HEADRACE_COMPLETE").source())
