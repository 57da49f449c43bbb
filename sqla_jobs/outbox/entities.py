"""Mapped instances as arguments: they travel as their primary key, also while they have none yet.

Reads identities without SQL, also of expired and detached instances. Does not load anything: whoever
decodes hands in how.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from enum import Enum
from functools import cache
from inspect import get_annotations
from typing import Any, get_args

from sqlalchemy import ClauseElement, DateTime, TypeDecorator, inspect
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


def has_pending(references: Iterable[Reference]) -> bool:
    """Whether one of them has no identity yet."""
    return any(inspect(each.entity).identity is None for each in references)


@cache
def _key_converters(mapper: Mapper[Any]) -> tuple[Converter, ...]:
    return tuple(_key_converter(mapper, key) for key in mapper.primary_key)


def _key_converter(mapper: Mapper[Any], key: Any) -> Converter:
    """By what the class says of the attribute; a type of the user's own (GUID, say) need not say anything."""
    if isinstance(key.type, DateTime) and not key.type.timezone:
        return _NaiveDatetime()
    hinted = _hint(mapper, key)
    try:
        found: Any = key.type.python_type
    except NotImplementedError:
        found = object
    says_itself = found is not object and not isinstance(key.type, TypeDecorator)
    chosen = found if says_itself or hinted is None else hinted
    if chosen is object:
        raise PayloadError(
            f"{mapper.class_.__name__}.{mapper.get_property_by_column(key).key} is a key of type "
            f"{key.type!r}, which does not say what it is in Python: annotate it, as Mapped[uuid.UUID] or "
            "whatever it is"
        )
    return converter(chosen)


def _hint(mapper: Mapper[Any], key: Any) -> Any:
    """X of `Mapped[X]`; None where there is no such annotation, or none that can be resolved."""
    name = mapper.get_property_by_column(key).key
    for cls in mapper.class_.__mro__:
        annotation = get_annotations(cls).get(name)
        if annotation is None:
            continue
        with suppress(Exception):
            if isinstance(annotation, str):
                annotation = eval(annotation, vars(sys.modules[cls.__module__]))  # noqa: S307 - the class's own
            [found] = get_args(annotation)
            return found
    return None


class _NaiveDatetime:
    """As a key, and nowhere else: it need not name an instant to be the same again."""

    def encode(self, value: object, path: str) -> Json:
        if not isinstance(value, datetime) or value.tzinfo is not None:
            raise PayloadError(f"{path} must be a datetime without a time zone", path=path)
        return value.isoformat()

    def decode(self, value: Json, path: str, load: Load) -> object:
        try:
            return datetime.fromisoformat(str(value))
        except ValueError:
            raise PayloadError(f"{path} must be a datetime", path=path) from None


def _plain(value: Any) -> Any:
    """A subclass of the user's as what it is: what a TypeDecorator returns, say."""
    for kind in (str, int):
        if isinstance(value, kind) and not isinstance(value, (bool, Enum)):
            return kind(value)
    return value


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
        reference = Reference(value, path)
        identity = inspect(value).identity
        if identity is not None:
            stored(reference, identity)  # what cannot travel is refused at the call
        return reference

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
        key.encode(_plain(part), reference.path)
        for key, part in zip(_key_converters(mapper), identity, strict=True)
    ]
    return parts[0] if len(parts) == 1 else parts


def entity_hook(annotation: object) -> Converter | None:
    """A converter for mapped classes, for `core.payload`: they travel as their identity."""
    mapper: Any = inspect(annotation, raiseerr=False) if isinstance(annotation, type) else None
    return _Entity(mapper) if isinstance(mapper, Mapper) else None
