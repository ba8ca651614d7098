"""The door through which every configuration comes: a ConfigDict in, frozen dataclasses out.

A key that no dataclass knows is an error that names the nearest one that exists.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import ml_collections


class ConfigError(ValueError):
  """A configuration that cannot be run; the message says the mend."""


def flatten(values: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Nested keys joined with dots."""
  for key, value in values.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f'{prefix}{key}.')
    else:
      yield prefix + key, value


def plain(config) -> dict[str, Any]:
  """ConfigDicts all the way down to plain dicts."""
  def walk(value):
    if isinstance(value, ml_collections.ConfigDict | Mapping):
      return {key: walk(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
      return tuple(walk(child) for child in value)
    return value

  return walk(config)


def build(cls, values: Mapping[str, Any], section: str):
  """`cls(**values)` with errors that name the key as the user writes it."""
  prefix = f'{section}.' if section else ''
  fields = {field.name: field for field in dataclasses.fields(cls)}
  values = dict(values)
  for key, value in values.items():
    if key not in fields:
      near = difflib.get_close_matches(key, fields, 1)
      known = f'did you mean {prefix}{near[0]}?' if near else f'known: {", ".join(sorted(fields))}'
      raise ConfigError(f'unknown key {prefix}{key}; {known}')
    wanted = fields[key].type
    if _item(wanted) is str and isinstance(value, tuple):
      if any(isinstance(item, float) for item in value):
        raise ConfigError(f'{prefix}{key} is {value}: how a number was written is lost; quote them '
                          """all, as in --config.KEY="('1.50','2')\"""")
      values[key] = value = tuple(map(_text, value))
    if not _fits(value, wanted):
      name = f'({_item(wanted).__name__}, ...)' if _item(wanted) else wanted.__name__
      raise ConfigError(f'{prefix}{key} is {value!r}, of type {type(value).__name__}; '
                        f'{name} is needed')
  missing = [name for name, field in fields.items() if name not in values
             and field.default is dataclasses.MISSING
             and field.default_factory is dataclasses.MISSING]
  if missing:
    raise ConfigError(f'missing: {", ".join(prefix + name for name in missing)}')
  try:
    return cls(**values)
  except ConfigError:
    raise
  except (TypeError, ValueError) as error:
    message = str(error)
    raise ConfigError(message if message.startswith(prefix) else f'{prefix}{message}') from error


def _item(wanted) -> type | None:
  """What a tuple[X, ...] holds."""
  return get_args(wanted)[0] if get_origin(wanted) is tuple else None


def _text(value):
  """A number as the text that was typed: 1,2,3 on a command line arrives as numbers."""
  return str(value) if isinstance(value, int) else value


def _fits(value, wanted) -> bool:
  """Whether a number, a text or a tuple of them is one; the rest the dataclasses check."""
  if _item(wanted):
    return isinstance(value, tuple) and all(_fits(item, _item(wanted)) for item in value)
  if wanted is float:
    return isinstance(value, int | float) and not isinstance(value, bool)
  return wanted not in (int, bool, str) or type(value) is wanted
