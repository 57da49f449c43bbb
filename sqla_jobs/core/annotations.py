"""From an annotation to the codec of its values: what a parameter of that type takes and gives back.

Unions, literals, generics, aliases, and whatever hooks bring in. One compiler serves one handler.
"""

import operator
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, InitVar, fields, is_dataclass
from enum import Enum, Flag
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from sqla_jobs.core.codecs import (
    _ALL,
    _ANY,
    _DUMPED,
    _INT,
    _NO_KINDS,
    _NULL,
    _PLAIN,
    _STR,
    Converter,
    Hook,
    Load,
    Reference,
    _about,
    _At,
    _Codec,
    _dump,
    _list,
    _mapping,
    _named,
    _object,
    _path,
    _refuse,
    _sorted,
    _trial,
    _tuple,
    _Unsupported,
    _Untried,
    _untried,
    _via,
    _Way,
    _write_dumped,
    _wrong,
)
from sqla_jobs.errors import PayloadError


def _enum(cls: type[Enum]) -> _Codec:
    """By value if every value is a str or an int, else by name; flags by their int."""
    if issubclass(cls, Flag):
        return _via(_INT, cls, lambda member: member.value, lambda number: _flag(cls, number))
    by_value = all(type(member.value) in (str, int) for member in cls)
    members = {member.value if by_value else member.name: member for member in cls}
    kinds = frozenset(map(type, members))
    inner = _ANY if len(kinds) != 1 else _INT if int in kinds else _STR
    return _via(inner, cls, lambda m: m.value if by_value else m.name, members.__getitem__, kinds=kinds)


def _flag(cls: type[Flag], number: int) -> Flag:
    """The flag of a stored number; Python 3.11.2 makes an empty one of bits that it does not know."""
    flag = cls(number)
    if flag.value != number:
        raise ValueError(f"{number} is no {cls.__name__}")
    return flag


def _literal(values: tuple[Any, ...], codec: Callable[[Any], _Codec], name: str) -> _Codec:
    stored = [codec(type(value)).encode(value, (None, name, 0), _untried) for value in values]
    there = {(type(value), value): text for value, text in zip(values, stored, strict=True)}
    back = {(type(text), text): value for value, text in zip(values, stored, strict=True)}
    if len(there) != len(back):
        raise _Unsupported(f"two values of {name} are one in JSON")

    def way(table: dict[Any, Any]) -> _Way:
        known = frozenset(kind for kind, _ in table)

        def run(value: Any, at: _At, load: Load) -> Any:
            found = type(value) in known and (type(value), value) in table
            return table[type(value), value] if found else _wrong(at, "one of the literals", value)

        return run

    return _Codec(name, way(there), way(back), frozenset(map(type, stored)), frozenset(map(type, values)))


def _outside(found: Converter, name: str) -> _Codec:
    def encode(value: Any, at: _At, load: Load) -> Any:
        made = found.encode(value, _path(at))
        return made if type(made) is Reference else _write_dumped(made, at, load)

    def decode(value: Any, at: _At, load: Load) -> Any:
        return found.decode(value, _path(at), load)

    return _Codec(name, encode, decode, _ALL, alone=True)


def _optional(codec: _Codec) -> _Codec:
    def way(step: _Way) -> _Way:
        return lambda value, at, load: None if value is None else step(value, at, load)

    kinds, whole, name = codec.kinds | {_NULL}, codec.takes_all | {_NULL}, f"{codec.name} | None"
    return _Codec(name, way(codec.encode), way(codec.decode), kinds, codec.types, whole, codec.alone)


def _union(members: tuple[_Codec, ...], name: str) -> _Codec:
    """Told apart by JSON type first, then by order; a value that would come back as another's is refused."""
    taken = _NO_KINDS
    for member in members:
        if member.alone:
            raise _Unsupported(f"in a union, only None can be told from {member.name}; take the others out")
        if member.kinds <= taken:
            raise _Unsupported(f"in {name}, {member.name} would never come back; put it first")
        taken |= member.takes_all
    stored = [member.kinds | ({int} if float in member.kinds else _NO_KINDS) for member in members]
    apart = sum(map(len, stored)) == len(_NO_KINDS.union(*stored))
    order = {kind: sorted(members, key=lambda member: kind not in member.kinds) for kind in _ALL}

    def pick(value: Any, at: _At, load: Load) -> tuple[_Codec, Any]:
        for member in order[type(value)]:
            with suppress(PayloadError):
                return member, member.decode(value, at, load)
        return _wrong(at, name, value)

    def survives(encoded: Any, member: _Codec, at: _At) -> bool:
        with suppress(_Untried):
            return _trial(encoded, pick, at)[0] is member  # then that member's own promise holds
        return False

    def encode(value: Any, at: _At, load: Load) -> Any:
        kind, reason = type(value), None
        for member in sorted(members, key=lambda member: kind not in member.types):
            try:
                encoded = member.encode(value, at, load)
            except PayloadError as error:
                reason = reason or (error if kind in member.types else None)
                continue
            if not apart and not survives(encoded, member, at):
                _refuse(
                    at, f"as JSON this {_about(value)} is taken for another of {name}; wrap it in a dataclass"
                )
            return encoded
        if reason is not None:
            raise reason
        return _wrong(at, name, value)

    own = _NO_KINDS.union(*(member.types for member in members))
    return _Codec(name, encode, lambda *given: pick(*given)[1], _NO_KINDS.union(*stored), own, taken)


_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_SETS = {set: set, abc.Set: set, abc.MutableSet: set, frozenset: frozenset}
_DICTS = (dict, abc.Mapping, abc.MutableMapping)


class _Compiler:
    """Annotations to codecs; a class or an alias that contains itself finds the codec under way."""

    def __init__(self, hooks: Sequence[Hook], names: Mapping[str, object]) -> None:
        self.hooks, self.names = hooks, names
        self.known: dict[object, _Codec] = {}

    def hints(self, owner: Any, scope: dict[str, Any]) -> dict[str, Any]:
        """Late, so that what is defined further down exists; `names` stand in for TYPE_CHECKING imports."""
        given = None if isinstance(owner, type) else scope
        try:
            return typing.get_type_hints(owner, given, include_extras=True)
        except NameError:
            absent = {name: value for name, value in self.names.items() if name not in scope}
            return typing.get_type_hints(owner, given, absent, include_extras=True)

    def codec(self, annotation: Any) -> _Codec:
        name, origin, args = _named(annotation), get_origin(annotation), get_args(annotation)
        for hook in self.hooks:
            if (found := hook(annotation)) is not None:
                return _outside(found, name)
        if origin is Annotated or origin is Final:
            return self.codec(args[0])
        if origin is Literal:
            return _literal(args, self.codec, name)
        if origin is Union or origin is types.UnionType:
            members = tuple(self.codec(each) for each in args if each is not _NULL)
            united = members[0] if len(members) == 1 else _union(members, name)
            return _optional(united) if _NULL in args else united
        if origin is None and annotation in _PLAIN:
            return _PLAIN[annotation]
        if isinstance(annotation, typing.TypeVar):
            return _ANY
        if hasattr(annotation, "__supertype__"):
            return self.codec(annotation.__supertype__)
        return self.container(origin or annotation, args, name) or self.once(annotation, origin, args, name)

    def container(self, origin: Any, args: tuple[Any, ...], name: str) -> _Codec | None:
        if origin in _LISTS:
            return _list(self.codec(*args or (Any,)))
        if origin in _SETS:
            return _via(_list(self.codec(*args or (Any,))), _SETS[origin], _sorted, _SETS[origin])
        if origin is tuple and (not args or args[-1] is Ellipsis):
            return _via(_list(self.codec(args[0] if args else Any)), tuple, list, tuple)
        if origin is tuple:
            return _tuple(tuple(map(self.codec, args)))
        if origin in _DICTS:
            key, item = args or (str, Any)
            return _mapping(self.codec(str if key is Any else key), self.codec(item), name)
        return None

    def once(self, annotation: Any, origin: Any, args: tuple[Any, ...], name: str) -> _Codec:
        if annotation not in self.known:
            cell: list[_Codec] = []

            def encode(value: Any, at: _At, load: Load) -> Any:
                return cell[0].encode(value, at, load)

            def decode(value: Any, at: _At, load: Load) -> Any:
                return cell[0].decode(value, at, load)

            self.known[annotation] = _Codec(name, encode, decode, _ALL)
            cell.append(self.structure(annotation, origin or annotation, args, name))
            self.known[annotation] = cell[0]
        return self.known[annotation]

    def structure(self, annotation: Any, cls: Any, args: tuple[Any, ...], name: str) -> _Codec:
        if type(cls).__name__ == "TypeAliasType":
            owner = types.SimpleNamespace(__annotations__={name: cls.__value__})
            return self.codec(_filled(self.hints(owner, _scope(cls))[name], cls.__type_params__, args))
        if isinstance(cls, type) and issubclass(cls, Enum):
            return _enum(cls)
        if hasattr(cls, "model_validate_json") and hasattr(cls, "model_dump"):
            return _pydantic(cls)
        if hasattr(cls, "__struct_fields__"):
            return _msgspec(cls, annotation)
        typed_dict = hasattr(cls, "__required_keys__")
        if not isinstance(cls, type) or not (
            is_dataclass(cls) or typed_dict or hasattr(cls, "_field_defaults")
        ):
            raise _Unsupported("nothing here can carry it; pass its identity, or its parts as a dataclass")
        try:
            hints = self.hints(cls, _scope(cls))
        except NameError as error:
            raise _Unsupported(f"in {name}, {error}") from error
        free = getattr(cls, "__parameters__", ())
        hints = {field: _filled(hint, free, args) for field, hint in hints.items()}
        return self.typed_dict(cls, hints) if typed_dict else self.fields(cls, hints)

    def typed_dict(self, cls: Any, hints: dict[str, Any]) -> _Codec:
        members, required = {}, set(cls.__required_keys__)
        for field, hint in hints.items():
            while getattr(get_origin(hint), "_name", "") in ("Required", "NotRequired", "ReadOnly"):
                if get_origin(hint) is typing.Required:  # __required_keys__ is wrong where these were quoted
                    required.add(field)
                elif get_origin(hint) is typing.NotRequired:
                    required.discard(field)
                hint = get_args(hint)[0]
            members[field] = self.codec(hint)
        return _object(members, required, cls.__qualname__)

    def fields(self, cls: Any, hints: dict[str, Any]) -> _Codec:
        """Of a dataclass or a NamedTuple."""
        if any(isinstance(hint, InitVar) for hint in hints.values()):
            raise _Unsupported(f"{cls.__qualname__} has an InitVar, which its instances do not give back")
        trusted, late, names = False, set[str](), list(getattr(cls, "_fields", ()))
        required = set(names) - getattr(cls, "_field_defaults", {}).keys()
        if options := getattr(cls, "__dataclass_params__", None):
            trusted = options.init and not hasattr(cls, "__post_init__")
            late = {field.name for field in fields(cls) if not field.init}
            names = [field.name for field in fields(cls)]
            required = {f.name for f in fields(cls) if f.init and f.default is f.default_factory is MISSING}
        inner = _object(
            {name: self.codec(hints.get(name, Any)) for name in names}, required, cls.__qualname__
        )

        def take(value: Any) -> dict[str, Any]:
            return {field: getattr(value, field) for field in names}

        def make(content: dict[str, Any]) -> Any:
            made = cls(**{field: value for field, value in content.items() if field not in late})
            for field in late & content.keys():
                object.__setattr__(made, field, content[field])  # frozen ones too
            return made

        def same(again: Any, value: Any) -> bool:
            one, other = (_dump(inner.encode(take(each), (None, "", 0), _untried)) for each in (again, value))
            return one == other or bool(again == value)  # without the text, eq=False would never be the same

        return _via(inner, cls, take, make, same=None if trusted else same)


def _scope(cls: Any) -> dict[str, Any]:
    return getattr(sys.modules.get(cls.__module__), "__dict__", {})


def _filled(hint: Any, parameters: Sequence[Any], args: Sequence[Any]) -> Any:
    """The hint with its type variables replaced; those without a value become Any."""
    table = dict(zip(parameters, args, strict=False))
    if isinstance(hint, typing.TypeVar):
        return table.get(hint, Any)
    if isinstance(hint, type):  # a generic class by itself keeps its own
        return hint
    free = getattr(hint, "__parameters__", ())
    return hint[tuple(table.get(each, Any) for each in free)] if free else hint


def _pydantic(cls: Any) -> _Codec:
    def take(value: Any) -> Any:
        return value.model_dump(mode="json", by_alias=True, round_trip=True)

    def make(stored: Any) -> Any:
        return cls.model_validate_json(_dump(stored))

    kinds = _ALL - {_NULL} if getattr(cls, "__pydantic_root_model__", False) else frozenset({dict})
    return _via(_DUMPED, cls, take, make, same=operator.eq, kinds=kinds)


def _msgspec(cls: Any, annotation: Any) -> _Codec:
    msgspec: Any = sys.modules["msgspec"]  # whoever defined a Struct has loaded it

    def take(value: Any) -> Any:
        return msgspec.to_builtins(value, str_keys=True)

    def make(stored: Any) -> Any:
        return msgspec.convert(stored, annotation, str_keys=True)

    kinds = frozenset({list if cls.__struct_config__.array_like else dict})
    return _via(_DUMPED, cls, take, make, same=operator.eq, fails=msgspec.MsgspecError, kinds=kinds)
