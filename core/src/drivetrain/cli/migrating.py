"""What ``drivetrain config migrate`` writes, and whether it is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.config.migration import Translation

__all__ = ["problems_in", "translated_text"]


def translated_text(file: str, translation: Translation) -> str:
    """A file of settings, with what could not be translated as comments at its end.

    Args:
        file: Where the settings are from.
        translation: Of that file.
    """
    from drivetrain.config.template import settings_text

    text = f"# Translated from {file} by `drivetrain config migrate`.\n{settings_text(translation.layer)}"
    if translation.missing:
        text += "\n# Not translated:\n" + "".join(f"#   {line}\n" for line in translation.missing)
    return text


def problems_in(text: str, name: str) -> list[str]:
    """What is wrong with a file of settings, plugins and their sections included; a message for each problem.

    Args:
        text: Its content.
        name: What it is called in messages.
    """
    from drivetrain.checking import contradictions, problems_of
    from drivetrain.config.reader import parse
    from drivetrain.config.resolve import merged_layers
    from drivetrain.config.values import Origin, Table, Value
    from drivetrain.errors import ConfigError

    try:
        layer = parse(text, lambda mark: Origin("file", name, mark.line + 1, mark.column + 1))
        layer = layer or Value(Table(), Origin("file", name))
        resolved = merged_layers((layer,), name)
        return [*problems_of(resolved), *contradictions(resolved)]
    except ConfigError as error:
        return [str(error)]
