"""config.json of Hugging Face and bert_config.json of Google: our sizes from them and to them."""

import json
from typing import Any

from etils import epath

from bertjax.convert.names import ConversionError
from bertjax.model import BertConfig

# Their names of activations -> ours. The same word means two things: Google's `gelu` is the tanh
# form, Transformers' the exact one.
HUGGING_FACE_ACTIVATIONS = {
    'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'relu': 'relu',
    'silu': 'silu', 'swish': 'silu',
}
GOOGLE_ACTIVATIONS = {'gelu': 'gelu_tanh', 'relu': 'relu'}

_REQUIRED = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads',
             'intermediate_size', 'max_position_embeddings')
_NUMBERS = {
    'type_vocab_size': int, 'hidden_dropout_prob': float, 'attention_probs_dropout_prob': float,
    'initializer_range': float, 'layer_norm_eps': float,
}


def read(path: epath.Path) -> dict[str, Any]:
  """The JSON object in a file.

  Raises:
    ConversionError: no such file, or no JSON object in it.
  """
  if not path.exists():
    raise ConversionError(f'{path}: no such file; a checkpoint must have its sizes beside it')
  try:
    values = json.loads(path.read_bytes().decode('utf-8-sig'))  # Windows may put a mark before it
  except ValueError as error:  # UnicodeDecodeError is one
    raise ConversionError(f'{path}: not JSON: {error}') from None
  if not isinstance(values, dict):
    raise ConversionError(f'{path}: holds {type(values).__name__} instead of a JSON object')
  return values


def bert_config(values: dict[str, Any], path: epath.Path, activations: dict[str, str],
                hidden_act: str | None = None) -> BertConfig:
  """Our sizes from such a file.

  Args:
    values: its content.
    path: its name, for messages.
    activations: its names of activations and ours.
    hidden_act: an activation of ours to take whatever the file says.

  Raises:
    ConversionError: a size is missing or impossible, or an activation is unknown.
  """
  absent = [name for name in _REQUIRED if name not in values]
  if absent:
    raise ConversionError(f'{path}: has no {", ".join(absent)}')
  types = dict.fromkeys(_REQUIRED, int) | _NUMBERS
  sizes = {name: values[name] for name in types if values.get(name) is not None}
  for name, value in sizes.items():
    if isinstance(value, bool) or not isinstance(value, int | types[name]):
      raise ConversionError(f'{path}: {name} is {value!r}; it must be a number'
                            f'{" without a fraction" if types[name] is int else ""}')
  theirs = values.get('hidden_act', 'gelu')
  if hidden_act is None and theirs not in activations:
    raise ConversionError(f'{path}: hidden_act {theirs!r} is not one that bertjax has; known here '
                          f'are {", ".join(activations)}')
  try:
    return BertConfig(**{name: types[name](value) for name, value in sizes.items()},
                      hidden_act=hidden_act or activations[theirs])
  except ValueError as error:
    raise ConversionError(f'{path}: {error}') from None


def sizes(config: BertConfig, activations: dict[str, str]) -> dict[str, Any]:
  """What both files have in common, under their names.

  Raises:
    ConversionError: an activation that the other side does not have.
  """
  theirs = {ours: name for name, ours in reversed(activations.items())}
  if config.hidden_act not in theirs:
    raise ConversionError(f'hidden_act {config.hidden_act!r} does not exist there; only '
                          f'{", ".join(theirs)} can be exported in this format')
  return {'hidden_act': theirs[config.hidden_act],
          **{name: getattr(config, name) for name in (*_REQUIRED, *_NUMBERS)}}
