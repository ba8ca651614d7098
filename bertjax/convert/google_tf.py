"""Google's TensorFlow checkpoints: bert_config.json and bert_model.ckpt.{index,data-*}.

TensorFlow only reads and writes the files; no graph is built. It is imported where it is needed.

Source: google-research/bert modeling.py (names and sizes), optimization.py (slots).
"""

import json
import re
from typing import Any

import numpy as np
from etils import epath

from bertjax.convert import config_file, names, parameters
from bertjax.convert.config_file import GOOGLE_ACTIVATIONS
from bertjax.convert.names import ConversionError
from bertjax.convert.parameters import Source, Tensors, some
from bertjax.model import BertConfig

CONFIG, PREFIX = 'bert_config.json', 'bert_model.ckpt'
LAYER_NORM_EPS = 1e-12  # a constant of Google's code, not in its config
# Training state beside the variables: moments of Adam, LAMB and others, step and loss-scale
# counters.
_TRAINING = re.compile(
    r'(/(adam|lamb)_[mv]|/(Adam|LAMB|AdamWeightDecay\w*|LAMBOptimizer)(_\d)?|/Momentum|/[mv])$'
    r'|^(global_step|beta[12]_power|good_steps|loss_scale|current_loss_scale)$')
_OBJECTS = '_CHECKPOINTABLE_OBJECT_GRAPH'  # the mark of TensorFlow 2's other kind of checkpoint
_HEAD = 'bertjax'  # our key in bert_config.json; Google's code leaves it alone


def read(path: epath.PathLike, hidden_act: str | None = None) -> Source:
  """Reads a checkpoint.

  Args:
    path: its prefix, as in 'uncased_L-12_H-768_A-12/bert_model.ckpt', or its folder.
    hidden_act: an activation of ours to take instead of Google's: its `gelu` is the tanh form.

  Raises:
    ConversionError: no checkpoint there, a damaged one, or sizes that are not BERT's.
  """
  prefix = _prefix(epath.Path(path).expanduser())
  file = prefix.parent / CONFIG
  values = config_file.read(file)
  config = config_file.bert_config(values, file, GOOGLE_ACTIVATIONS, hidden_act)
  if 'type_vocab_size' not in values:
    raise ConversionError(f'{file}: has no type_vocab_size')
  tensors, skipped = _read_variables(prefix)
  head = dict(values.get(_HEAD) or {})
  kind = head.pop('kind', None) or _kind(tensors)
  if kind not in names.GROUPS:
    raise ConversionError(f'{file}: {_HEAD}.kind {kind!r} is none of {", ".join(names.GROUPS)}')
  labels = head.pop('labels', None)
  if labels is None:
    labels = [f'LABEL_{index}' for index in range(len(tensors['output_bias']))] if (
        kind == 'classification') else []
  gelu = [] if values.get('hidden_act') != 'gelu' else [
      f'hidden_act gelu of Google is {config.hidden_act} here'
      + ('' if hidden_act is None else ', as asked')]
  return Source(path=str(prefix), folder=prefix.parent, style=names.GOOGLE, config=config,
                tensors=tensors, kind=kind, labels=labels, facts=head, skipped=skipped, notes=gelu)


def _prefix(path: epath.Path) -> epath.Path:
  """The prefix of the one checkpoint that is meant."""
  if not path.is_dir():
    path = path.parent / re.sub(r'\.(index|data-\d+-of-\d+)$', '', path.name)
    if not (path.parent / f'{path.name}.index').exists():
      raise ConversionError(f'{path}: there is no {path.name}.index; tf: takes the prefix of a '
                            f'TensorFlow checkpoint (as in {PREFIX}) or its folder')
    return path
  found = sorted(file.name.removesuffix('.index') for file in path.glob('*.index'))
  if PREFIX in found:
    return path / PREFIX
  if len(found) != 1:
    what = f'holds {", ".join(found)}: give one of them' if found else 'holds no *.index file'
    raise ConversionError(f'{path}: {what}')
  return path / found[0]


def _read_variables(prefix: epath.Path) -> tuple[Tensors, dict[str, list[str]]]:
  """The model's variables, and the names of the optimizer's by why they were left aside."""
  import tensorflow as tf
  try:
    reader = tf.train.load_checkpoint(str(prefix))
    stored = sorted(reader.get_variable_to_shape_map())
    skipped = [name for name in stored if _TRAINING.search(name)]
    tensors = {name: reader.get_tensor(name) for name in stored
               if name not in {*skipped, _OBJECTS}}
  except Exception as error:  # TensorFlow raises many kinds, IndexError for a file cut off
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise ConversionError(f'{prefix}: cannot be read: {first}; copy its files again') from None
  if _OBJECTS in stored:
    raise ConversionError(f'{prefix}: holds the objects of a TensorFlow 2 program and not named '
                          'variables; give a checkpoint of google-research/bert')
  return tensors, {'optimizer slots and counters': skipped} if skipped else {}


def _kind(tensors: Tensors) -> str:
  if 'cls/squad/output_weights' in tensors:
    return 'span'
  if 'output_weights' in tensors:
    return 'regression' if len(tensors['output_weights']) == 1 else 'classification'
  return 'pretraining' if any(name.startswith('cls/predictions/') for name in tensors) else (
      'encoder')


def write(folder: epath.Path, params: dict[str, Any], config: BertConfig, head: dict[str, Any],
          accept_gelu_mismatch: bool = False) -> list[str]:
  """Writes bert_config.json and bert_model.ckpt; vocab.txt is the caller's affair.

  Args:
    folder: an empty folder.
    params: our parameters.
    config: the sizes.
    head: 'kind', 'labels' and task facts, as in the metadata of a checkpoint.
    accept_gelu_mismatch: write a model of the exact gelu although Google's code will compute the
      tanh form with it.

  Returns:
    What to tell the user.

  Raises:
    ConversionError: something that Google's code cannot compute.
  """
  notes = []
  if config.hidden_act == 'gelu':
    if not accept_gelu_mismatch:
      raise ConversionError(
          'the model was trained with the exact gelu, and Google\'s code has the tanh form only: '
          'its outputs there differ by about 1e-3; accept that with --accept_gelu_mismatch')
    notes.append('exact gelu written as gelu, which Google\'s code computes in the tanh form')
  if config.layer_norm_eps != LAYER_NORM_EPS:
    raise ConversionError(f'layer_norm_eps is {config.layer_norm_eps}, but Google\'s code always '
                          f'computes with {LAYER_NORM_EPS}; export with --to hf')
  activations = GOOGLE_ACTIVATIONS if config.hidden_act != 'gelu' else {'gelu': 'gelu'}
  values = config_file.sizes(config, activations)
  del values['layer_norm_eps']
  values[_HEAD] = head
  present = parameters.groups_of(params)
  groups = [group for group in names.GROUPS[head['kind']] if group in present]
  tensors = parameters.spread(params, names.GOOGLE, config, groups,
                              lambda array: np.ascontiguousarray(array, np.float32))
  _write_variables(folder / PREFIX, tensors)
  text = json.dumps(values, indent=2, ensure_ascii=False) + '\n'
  (folder / CONFIG).write_text(text, encoding='utf-8')
  return [*notes, f'{len(tensors)} variables under Google\'s names: {some(groups)}']


def _write_variables(prefix: epath.Path, tensors: Tensors):
  """A checkpoint of plain names, as TensorFlow 1's Saver wrote it."""
  import tensorflow as tf
  order = sorted(tensors)
  tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=order, shape_and_slices=[''] * len(order),
                    tensors=[tf.constant(tensors[name]) for name in order])
