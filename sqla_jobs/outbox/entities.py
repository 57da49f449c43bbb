"""Mapped instances as arguments: they travel as their primary key, also while they have none yet.

Reads identities without SQL, also of expired and detached instances. Does not load anything: whoever
decodes hands in how.
"""

from functools import cache
from typing import Any

from sqlalchemy import ClauseElement, inspect
from sqlalchemy.orm import InstanceState, Mapper, Session

from sqla_jobs.core.payload import Converter, Json, Load, Reference, converter
from sqla_jobs.errors import PayloadError

__all__ = ["entity_hook", "identity_of", "is_pending", "stored"]


def is_pending(session: Session, reference: Reference) -> bool:
    """Whether this flush is to insert the entity. Raises `PayloadError` for one that no flush here will.

    A key that it has already may still change, in a before_insert listener or by a relationship.
    """
    state: InstanceState[Any] = inspect(reference.entity)
    if state.identity is None and reference.entity not in session:
        problem = "is pending in another session" if state.pending else "is not in the session"
        raise PayloadError(
            f"argument {reference.path}: the {type(reference.entity).__name__} {problem}, so this flush "
            "gives it no identity: session.add() it and flush again, or roll back",
            path=reference.path,
        )
    return state.identity is None


def identity_of(session: Session, reference: Reference) -> tuple[Any, ...] | None:
    """The primary key of an entity argument; None while it waits for its INSERT.

    inspect(entity).identity and not its attributes: it needs no SQL, also of an expired or detached one.
    """
    state: InstanceState[Any] = inspect(reference.entity)
    if not is_pending(session, reference):
        return state.identity
    key = state.mapper.primary_key_from_instance(reference.entity)
    return None if any(part is None or isinstance(part, ClauseElement) for part in key) else tuple(key)


@cache
def _key_converters(mapper: Mapper[Any]) -> tuple[Converter, ...]:
    return tuple(converter(_python_type(key)) for key in mapper.primary_key)


def _python_type(key: Any) -> type:
    try:
        found: type = key.type.python_type
    except NotImplementedError:
        return str
    return found


class _Entity:
    """Between a mapped instance and its plain primary key; a list when the key is composite."""

    def __init__(self, mapper: Mapper[Any]) -> None:
        self._mapper = mapper
        self._class = mapper.class_

    def encode(self, value: object, path: str) -> Reference:
        if not isinstance(value, self._class):
            raise PayloadError(
                f"{path} must be {self._class.__name__}, got {type(value).__name__}", path=path
            )
        return Reference(value, path)

    def decode(self, value: Json, path: str, load: Load) -> object:
        keys = _key_converters(self._mapper)
        parts = value if len(keys) > 1 else [value]
        if not isinstance(parts, list) or len(parts) != len(keys):
            raise PayloadError(
                f"{path} must be the primary key of {self._class.__name__}, which has {len(keys)} columns",
                path=path,
            )
        identity = tuple(key.decode(part, path, load) for key, part in zip(keys, parts, strict=True))
        return load(self._class, identity if len(keys) > 1 else identity[0])


def stored(reference: Reference, identity: tuple[Any, ...]) -> Json:
    """What a payload holds of an identity."""
    mapper: Mapper[Any] = inspect(reference.entity).mapper
    parts: list[Any] = [
        key.encode(part, reference.path) for key, part in zip(_key_converters(mapper), identity, strict=True)
    ]
    return parts[0] if len(parts) == 1 else parts


def entity_hook(annotation: object) -> Converter | None:
    """A converter for mapped classes, for `core.payload`: they travel as their identity."""
    mapper: Any = inspect(annotation, raiseerr=False) if isinstance(annotation, type) else None
    return _Entity(mapper) if isinstance(mapper, Mapper) else None
