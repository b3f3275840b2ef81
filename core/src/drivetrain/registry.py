"""Find, check and load plugins by name, and choose where none is named.

Two rules. Only what was named is imported, and only after its metadata was found to fit. A plugin that was named and
is broken is an error with the cause; one that is met while guessing is noted and passed over.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from drivetrain import discovery
from drivetrain.discovery import CORE, GROUPS, TRACKERS, Entry, entries, exports, extras, keywords
from drivetrain.elsewhere import instead_of
from drivetrain.errors import EngineError, PluginError, PluginNotFoundError
from drivetrain.loading import (
    at_fault,
    by_name,
    create,
    describe,
    describe_all,
    forget,
    import_object,
    load,
    load_all,
    refused,
    stated,
)
from drivetrain.plugin import Capabilities, Precision
from drivetrain.requirements import plugin_extras, unmet

__all__ = [
    "GROUPS",
    "TRACKERS",
    "Entry",
    "at_fault",
    "check_engines",
    "choose_default_backend",
    "choose_device",
    "create",
    "describe",
    "describe_all",
    "entries",
    "exported",
    "exports",
    "extras",
    "find",
    "find_precision",
    "keyword",
    "keywords",
    "load",
    "load_all",
    "refresh",
    "refusal",
    "resolve_precision",
    "stated",
]

_KEYS: Mapping[str, str] = {"precision": "mixed_precision"}
"""Config key of a role, where it isn't the role's own name."""


def refresh() -> None:
    """Forget everything that was read or loaded. For tests, and after installing something in a running process."""
    discovery.refresh()
    forget()


# ------------------------------------------------------------------------------------------------------- find by name


def find(role: str, name: str, *, where: str | None = None) -> Entry:
    """The installed plugin of that name.

    Args:
        role: A key of ``GROUPS``, or ``"tracker"``.
        name: Entry name, or ``distribution:name`` where two distributions use one name.
        where: Where the name was written, such as ``config.yaml:3:10``. Begins the message of an error.

    Raises:
        PluginError: Two distributions provide that name.
        PluginNotFoundError: None does.
    """
    installed = entries()[role]
    providers = installed.get(name) or _qualified(installed, name)
    if not providers:
        raise PluginNotFoundError(_located(where, _not_found(role, name)))
    return _only(providers, where)


def find_precision(name: str, *, where: str | None = None) -> Entry | None:
    """The installed precision of that name; None if it is a family, whose member depends on device and backend.

    Raises:
        EngineError: It is a family, and no engine of its members is installed in a version that fits.
        PluginError: As of ``find``.
    """
    try:
        return find("precision", name, where=where)
    except PluginNotFoundError:
        members = _members(name)
        if not members:
            raise
    loaded, broken = load_all("precision")
    if not any(member in loaded for member in members):
        reasons = ". ".join(str(broken[member]) for member in members)
        raise EngineError(_located(where, f"no member of the precision family {name!r} works here. {reasons}"))
    return None


def _members(family: str) -> list[str]:
    """Precisions of a family in its own order, whether their engines are there or not."""
    described = describe_all("precision").items()
    return [
        name for _, name in sorted((found.family_rank, name) for name, found in described if found.family == family)
    ]


def _qualified(installed: Mapping[str, tuple[Entry, ...]], name: str) -> tuple[Entry, ...]:
    """Who provides a name given in full."""
    distribution, _, short = name.rpartition(":")
    return tuple(
        entry
        for entry in installed.get(short, ())
        if discovery.normalized(entry.distribution) == discovery.normalized(distribution)
    )


def _only(providers: tuple[Entry, ...], where: str | None = None) -> Entry:
    if len(providers) == 1:
        return providers[0]
    first, *_, last = providers
    who = " and ".join(f"{entry.distribution} {entry.version}" for entry in providers)
    cure = "uninstall one"
    if first.role in entries():
        cure += f", or name it in full: {_KEYS.get(first.role, first.role)}: {last.qualified}"
    many = "both " if len(providers) == 2 else ""
    raise PluginError(_located(where, f"{first.role} {first.name!r} is provided by {many}{who}; {cure}"))


def _located(where: str | None, message: str) -> str:
    return f"{where}: {message}" if where else message


def _not_found(role: str, name: str) -> str:
    installed, offered = entries()[role], plugin_extras(role)
    if name in offered:
        return f'{role} {name!r} is not installed: pip install "{CORE}[{name}]"'
    message = f"no {role} {name!r}"
    close = _closest(role, name)
    if close:
        message += f"; did you mean {close!r}?"
    if close and close not in installed:
        message += f' It is not installed: pip install "{CORE}[{close}]"'
    elsewhere = [other for other, names in entries().items() if name in names]
    if elsewhere:
        message += f" ({name!r} is a {elsewhere[0]}: {_KEYS.get(elsewhere[0], elsewhere[0])}: {name})"
    message += ("" if close else ".") + f" Installed: {_listing(installed)}"
    if role == "device":
        message += "; auto takes whatever accelerator is here"
    if not close and offered:
        message += f'. To be had by pip install "{CORE}[NAME]": {", ".join(offered)}'
    return "; ".join([message, *discovery.problems()])


def _closest(role: str, name: str) -> str | None:
    """The name, of what is installed and what can be had, that was probably meant."""
    word = name.lower()
    installed = difflib.get_close_matches(word, entries()[role], n=1)
    # To install something is advice to be surer of.
    return next(iter(installed or difflib.get_close_matches(word, plugin_extras(role), n=1, cutoff=0.7)), None)


def _listing(installed: Mapping[str, tuple[Entry, ...]]) -> str:
    def sources(name: str) -> str:
        return ", ".join(f"{entry.distribution} {entry.version}" for entry in installed[name])

    return ", ".join(f"{name} ({sources(name)})" for name in sorted(installed)) or "none"


def _chosen(role: str, names: list[str]) -> dict[str, tuple[Entry, ...]]:
    return {name: (by_name(role)[name],) for name in names}


def keyword(name: str) -> Entry | None:
    """Whose plugin claims a keyword of ``Accelerator(...)``; ``load`` gives the class its value must be of.

    Raises:
        PluginError: Two distributions claim it.
    """
    providers = keywords().get(name)
    return _only(providers) if providers else None


def exported(name: str) -> Any:
    """The object that an installed plugin exports as ``drivetrain.<name>``.

    Raises:
        AttributeError: No plugin exports that name.
        ImportError: The same, and it is known what to use instead. An AttributeError's text would be lost in
            ``from drivetrain import name``.
        PluginError: One does, but can't be loaded, or two do.
    """
    providers = exports().get(name)
    if providers is None:
        if instead := instead_of(name):
            raise ImportError(f"{CORE} has no {name}; use instead: {instead}", name=CORE)
        close = difflib.get_close_matches(name, exports(), n=1)
        hint = f"; did you mean {close[0]!r}, of {exports()[close[0]][0].distribution}?" if close else ""
        raise AttributeError(f"module {CORE!r} has no attribute {name!r}, and no installed plugin exports it{hint}")
    return import_object(_only(providers))


# ------------------------------------------------------------------------------------------- choose where none is named


def choose_default_backend() -> Entry:
    """The backend that several processes get when none is named: the one installed that offers itself for that.

    Raises:
        PluginError: None does, or several do.
    """
    loaded, broken = load_all("backend")
    claiming = [name for name, found in loaded.items() if found.default_for_many]
    if len(claiming) == 1:
        return by_name("backend")[claiming[0]]
    notes = "".join(f". {error}" for error in broken.values())
    if claiming:
        raise PluginError(
            f"several installed backends offer themselves as the default for several processes: "
            f"{_listing(_chosen('backend', claiming))}; name one: backend: {claiming[0]}{notes}"
        )
    hints = " or ".join(f'pip install "{CORE}[{extra}]"' for extra in plugin_extras("backend"))
    raise PluginError(
        f"several processes need a backend that distributes over them, and no installed one offers itself; name one "
        f"that can, or install one{': ' + hints if hints else ''}. Installed: {_listing(entries()['backend'])}{notes}"
    )


def choose_device() -> tuple[Entry, list[str]]:
    """What ``device: auto`` means here, and notes on plugins that could not be asked.

    The one device plugin whose hardware is present, else the generic one, which takes what torch reports.

    Raises:
        PluginError: The hardware of several is present, or there is no generic plugin (or more than one).
    """
    loaded, broken = load_all("device")
    notes = [str(error) for error in broken.values()]
    generic = [name for name, found in loaded.items() if found.generic]
    present = []
    for name, found in loaded.items():
        if found.generic:
            continue
        try:
            if found.present():
                present.append(name)
        except Exception as error:  # met while guessing: noted, and shown by whoever asked
            notes.append(f"{by_name('device')[name]} can't say whether it is present: {type(error).__name__}: {error}")
    chosen = present or generic
    if len(chosen) == 1:
        return by_name("device")[chosen[0]], notes
    listing = _listing(_chosen("device", chosen))
    what = "is present here" if present else "is installed as the generic device"
    cure = f"name one: device: {chosen[0]}" if chosen else f"reinstall it: pip install --force-reinstall {CORE}"
    raise PluginError(". ".join([f"device: auto finds no single answer, since {listing} {what}; {cure}", *notes]))


def check_engines(backend: Entry, device: Entry) -> None:
    """Check the engine that a backend drives against what the device asks of that engine.

    Raises:
        PluginError: An engine is installed in a version that the device can't use.
    """
    wanted = {discovery.normalized(engine): (engine, spec) for engine, spec in load(device).engine_requires.items()}
    driven = {discovery.normalized(text) for text in map(_engine_name, load(backend).requires)}
    missing = unmet(f"{wanted[name][0]}{wanted[name][1]}" for name in sorted(driven & set(wanted)))
    if missing:
        raise refused(backend, f"on {device} it {'; it '.join(missing)}")


def _engine_name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def refusal(
    precision: Precision, capabilities: Capabilities, device_type: str, dtypes: Collection[str] | None = None
) -> str | None:
    """Why a precision can't work with a backend of these capabilities on that type of device; None if it can.

    Args:
        precision: With its section.
        capabilities: Of the backend.
        device_type: Torch device type, such as ``"cpu"``.
        dtypes: Below 32 bits, that the device computes in; None: any.

    Raises:
        PluginError: It could not say; the exception is chained as the cause.
    """
    lacking = sorted(precision.needs - capabilities.features)
    if lacking:
        return f"it needs what the backend does not offer: {', '.join(lacking)}"
    try:
        compute = precision.policy.compute
        if dtypes is not None and compute not in (None, "float32", "float64", *dtypes):
            return (
                f"it computes in {compute}, and the device computes in {', '.join(sorted(dtypes)) or 'none of those'}"
            )
        return precision.refuses(capabilities, device_type)
    except Exception as error:
        what = f"{type(precision).__qualname__}.refuses raised {type(error).__name__}: {error}"
        raise PluginError(what) from error


def resolve_precision(
    name: str,
    device_type: str,
    capabilities: Capabilities,
    *,
    where: str | None = None,
    configure: Callable[[Entry, type[Precision]], Any] | None = None,
    configured: Collection[str] = (),
    dtypes: Collection[str] | None = None,
) -> tuple[Entry, list[str]]:
    """The precision of that name, or the first member of the family of that name that works here.

    Members that have settings come first, since whoever wrote those means them; then by ``family_rank``. Returns it
    with notes: a sentence on each member that was passed over, and on the choice. A precision named exactly is not
    asked whether it works; :func:`refusal` does.

    Args:
        name: Of a precision or a family.
        device_type: Torch device type, such as ``"cpu"``.
        capabilities: Of the backend.
        where: As in ``find``.
        configure: Builds the config a member of a family is asked with; its defaults if None.
        configured: Names of the sections that were given.
        dtypes: As in ``refusal``.

    Raises:
        PluginNotFoundError: There is neither.
        PluginError: The family has no member that works here; each one's reason is given.
    """
    installed = entries()["precision"]
    if name in installed or _qualified(installed, name):
        return find("precision", name, where=where), []
    loaded, broken = load_all("precision")
    members = sorted(
        (member not in configured, found.family_rank, member)
        for member, found in loaded.items()
        if found.family == name
    )
    reasons = [str(error) for error in broken.values()]
    if not members and not _members(name):
        # One that can't be loaded may be of that family, unless it is plain what was meant.
        told = [] if _closest("precision", name) in loaded else reasons
        raise PluginNotFoundError(_located(where, ". ".join([_not_found("precision", name), *told])))
    for unconfigured, _, member in members:
        entry = by_name("precision")[member]
        reason = _reason_against(entry, capabilities, device_type, configure, dtypes)
        if reason is None:
            why = "first of those that work" if unconfigured else "its section was given"
            return entry, [*reasons, f"{_KEYS['precision']}: {name} is {entry} here ({why})"]
        reasons.append(f"{entry}: {reason}")
    raise PluginError(_located(where, f"no member of the precision family {name!r} works here. {'. '.join(reasons)}"))


def _reason_against(
    entry: Entry,
    capabilities: Capabilities,
    device_type: str,
    configure: Callable[[Entry, type[Precision]], Any] | None,
    dtypes: Collection[str] | None,
) -> str | None:
    try:
        precision = create(entry, configure(entry, load(entry)) if configure else None)
        return refusal(precision, capabilities, device_type, dtypes)
    except PluginError as error:
        return str(error)
