"""Variables of a foreign checkpoint to our parameters and back, each exactly once.

Nothing here knows files: `hugging_face` and `google_tf` read and write those.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from flax import traverse_util

from bertjax.convert import names
from bertjax.convert.names import ConversionError, Variable
from bertjax.model import VOCAB_MULTIPLE, BertConfig

Tensors = dict[str, np.ndarray]

_WHAT = {names.HUGGING_FACE: 'config.json', names.GOOGLE: 'bert_config.json'}
# What lies here belongs to the encoder: a variable that no parameter takes is another model's.
_ENCODER = ('bert.embeddings.', 'bert.encoder.', 'bert/embeddings/', 'bert/encoder/')


@dataclasses.dataclass(frozen=True)
class Source:
  """A foreign checkpoint that has been read.

  Attributes:
    path: what the user named, for messages.
    folder: where its vocabulary may be.
    style: 'hf' or 'tf'.
    config: its sizes; `vocab_size` is the number of rows of its word table.
    tensors: its variables, under the style's present names.
    kind: the kind of head that it holds, as in the metadata of our checkpoints.
    labels: names of the head's outputs, where the checkpoint has some.
    facts: what else is known of the head, as in {'task': 'squad', 'null_threshold': -1.2}.
    skipped: names left aside that are no parameters, by the reason.
    notes: what was decided while reading, for the report.
  """

  path: str
  folder: epath.Path
  style: str
  config: BertConfig
  tensors: Tensors
  kind: str
  labels: list[str] = dataclasses.field(default_factory=list)
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)
  skipped: dict[str, list[str]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)


class Filled(NamedTuple):
  """Our parameters, and what became of each variable.

  Attributes:
    params: a nested dict of arrays.
    used: names of the variables that fill a parameter.
    unused: names of those that fill none.
    missing: groups of parameters that the checkpoint does not have.
  """

  params: dict[str, Any]
  used: list[str]
  unused: list[str]
  missing: list[str]


def some(found: Iterable[str], limit: int = 5) -> str:
  """The first few names of many, in words."""
  found = list(found)
  more = f' and {len(found) - limit} more' if len(found) > limit else ''
  return ', '.join(found[:limit]) + more


def fill(source: Source, kind: str, num_entries: int, dtype: Any) -> Filled:
  """Our parameters from a foreign checkpoint.

  Args:
    source: what was read.
    kind: the kind of head that the parameters are for.
    num_entries: entries of the vocabulary; further rows of the word table are dropped (B121).
    dtype: of the parameters.

  Raises:
    ConversionError: a variable is missing, of another shape, or left over in the encoder.
  """
  present, missing = _present(source, kind)
  wanted = [name for variable in present
            for name in variable.names(source.style, source.config.num_hidden_layers)]
  unused = [name for name in source.tensors if name not in set(wanted)]
  strange = [name for name in unused if name.startswith(_ENCODER)]
  if strange:
    raise ConversionError(f'{source.path}: {some(strange)}: variables of the encoder that the '
                          f'sizes in {_WHAT[source.style]} have no place for')
  if num_entries > source.config.vocab_size:
    raise ConversionError(
        f'{source.path}: the vocabulary has {num_entries} entries, but the word table only '
        f'{source.config.vocab_size} rows; give the vocabulary that belongs to it (--vocab)')
  sizes = names.sizes(source.config)
  flat = {}
  for variable in present:
    array = _gather(source, variable, sizes).astype(dtype)
    flat[variable.ours] = resize_vocabulary(array, variable, num_entries)
  return Filled(nested(flat), wanted, unused, missing)


def _present(source: Source, kind: str) -> tuple[list[Variable], list[str]]:
  """The variables to fill, and the groups that are not there at all."""
  present: list[Variable] = []
  missing = []
  for group in names.GROUPS[kind]:
    variables = names.of([group])
    absent = [name for variable in variables
              for name in variable.names(source.style, source.config.num_hidden_layers)
              if name not in source.tensors]
    total = sum(len(variable.names(source.style, source.config.num_hidden_layers))
                for variable in variables)
    if len(absent) == total and group in names.OPTIONAL.get(kind, ()):
      missing.append(group)
    elif absent:
      raise ConversionError(
          f'{source.path}: {some(absent)}: not in the checkpoint, but a model of kind {kind} with '
          f'{source.config.num_hidden_layers} layers needs '
          f'{"it" if len(absent) == 1 else "them"}')
    else:
      present += variables
  return present, missing


def _gather(source: Source, variable: Variable, sizes: dict[str, int]) -> np.ndarray:
  """One parameter: transposed where the other side does, layers stacked."""
  transpose = source.style in variable.transposed
  arrays = []
  for name in variable.names(source.style, source.config.num_hidden_layers):
    array = source.tensors[name]
    shape = [sizes.get(axis) for axis in (variable.axes[::-1] if transpose else variable.axes)]
    if len(shape) != array.ndim or any(
        size not in (None, actual) for size, actual in zip(shape, array.shape, strict=True)):
      wanted = ', '.join('any' if size is None else str(size) for size in shape)
      raise ConversionError(f'{source.path}: {name} has shape {list(array.shape)}, but the sizes '
                            f'in {_WHAT[source.style]} ask for [{wanted}]')
    if array.dtype.kind in 'biu':  # bfloat16 is of kind V
      raise ConversionError(f'{source.path}: {name} holds {array.dtype} and no floating point')
    arrays.append(array.T if transpose else array)
  return np.stack(arrays) if variable.stacked else arrays[0]


def resize_vocabulary(array: np.ndarray, variable: Variable, num_entries: int) -> np.ndarray:
  """Drops rows that no entry has; pads with zeros to the rows of our table."""
  axis = variable.axes.find('V')
  if axis < 0:
    return array
  array = array.take(range(num_entries), axis)
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, -num_entries % VOCAB_MULTIPLE)
  return np.pad(array, widths)


def nested(flat: dict[str, np.ndarray]) -> dict[str, Any]:
  """A nested dict from arrays by their path."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(params: dict[str, Any]) -> Tensors:
  """The arrays of a nested dict by their path."""
  return {path: np.asarray(array)
          for path, array in traverse_util.flatten_dict(params, sep='/').items()}


def groups_of(params: dict[str, Any]) -> list[str]:
  """The groups of parameters that a tree holds, whole.

  Raises:
    ConversionError: a part of a group, or a parameter that other frameworks do not know.
  """
  flat = flatten(params)
  known = {variable.ours: variable.group for variable in names.VARIABLES}
  strange = sorted(flat.keys() - known.keys())
  if strange:
    raise ConversionError(f'{some(strange)}: nothing in other frameworks corresponds to it; '
                          '--encoder_only exports the encoder without its head')
  groups = list(dict.fromkeys(known[path] for path in known if path in flat))
  lost = [variable.ours for variable in names.of(groups) if variable.ours not in flat]
  if lost:
    raise ConversionError(f'{some(lost)}: not among the parameters')
  return groups


def spread(params: dict[str, Any], style: str, config: BertConfig, groups: Iterable[str],
           convert: Callable[[np.ndarray], np.ndarray] = np.ascontiguousarray) -> Tensors:
  """The variables of a foreign checkpoint, without the rows that pad our word table.

  Args:
    params: our parameters.
    style: 'hf' or 'tf'.
    config: the sizes.
    groups: which groups to write.
    convert: applied to each array last: contiguous, and maybe of another type.

  Raises:
    ConversionError: the tree lacks a parameter of these groups.
  """
  flat = flatten(params)
  tensors: Tensors = {}
  for variable in names.of(groups):
    if variable.ours not in flat:
      raise ConversionError(f'{variable.ours}: not among the parameters')
    array = flat[variable.ours]
    axis = variable.axes.find('V')
    if axis >= 0:
      array = array.take(range(config.vocab_size), axis)
    each = variable.names(style, config.num_hidden_layers)
    parts = array if variable.stacked else [array]
    if len(parts) != len(each):
      raise ConversionError(f'{variable.ours} has {len(parts)} layers, but the config says '
                            f'{len(each)}')
    for name, part in zip(each, parts, strict=True):
      tensors[name] = convert(part.T if style in variable.transposed else part)
  return tensors
