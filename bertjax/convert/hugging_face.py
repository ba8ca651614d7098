"""Hugging Face directories: config.json, weights, tokenizer files; read and written without torch.

Source: Transformers modeling_bert.py, modeling_utils.py and configuration_bert.py (names, ties and
defaults).
"""

import json
import re
from typing import Any

import numpy as np
from etils import epath

from bertjax.convert import config_file, names, parameters, safetensors_file, torch_file
from bertjax.convert.config_file import HUGGING_FACE_ACTIVATIONS
from bertjax.convert.names import ConversionError
from bertjax.convert.parameters import Source, Tensors, some
from bertjax.model import BertConfig

# Kind of head -> (architecture, problem_type)
_ARCHITECTURES = {
    'encoder': ('BertModel', None),
    'classification': ('BertForSequenceClassification', 'single_label_classification'),
    'regression': ('BertForSequenceClassification', 'regression'),
    'multi_label': ('BertForSequenceClassification', 'multi_label_classification'),
    'choice': ('BertForMultipleChoice', None),
    'tagging': ('BertForTokenClassification', None),
    'span': ('BertForQuestionAnswering', None),
}
LABELLED = ('classification', 'regression', 'multi_label', 'tagging')
_WEIGHTS = ('model.safetensors', 'model.safetensors.index.json', 'pytorch_model.bin',
            'pytorch_model.bin.index.json')
_OTHER_WEIGHTS = ('tf_model.h5', 'flax_model.msgpack', 'rust_model.ot')
# Further spellings of a variable; both may be stored and must then agree.
_SPELLINGS = (
    (re.compile(r'(LayerNorm\.)gamma$'), r'\1weight'),  # before 2019
    (re.compile(r'(LayerNorm\.)beta$'), r'\1bias'),
    (re.compile(r'^cls\.predictions\.decoder\.bias$'), 'cls.predictions.bias'),
    (re.compile(r'^cls\.predictions\.decoder\.weight$'), 'bert.embeddings.word_embeddings.weight'),
)
_DECODER = 'cls.predictions.decoder.'
_BUFFERS = re.compile(r'(^|\.)embeddings\.(position_ids|token_type_ids)$')
_TASK_FACTS = 'bertjax'  # our key in config.json; others leave keys alone that they do not know


def read(path: epath.PathLike, hidden_act: str | None = None, head: str = 'auto',
         labels: list[str] | None = None) -> Source:
  """Reads a directory; see the module's top for what it may hold.

  Args:
    path: the directory.
    hidden_act: an activation of ours to take whatever config.json says.
    head: the kind of head that is wanted; 'auto' is what is there. Another head is not judged.
    labels: names of the outputs to take whatever config.json says.

  Raises:
    ConversionError: another kind of model, damaged files, two copies of one variable that differ,
      or labels that are not those of the outputs.
  """
  folder = epath.Path(path).expanduser()
  if not folder.is_dir():
    raise ConversionError(f'{folder}: no such folder; hf: takes the folder with config.json')
  values = config_file.read(folder / 'config.json')
  _check_supported(values, folder / 'config.json')
  config = config_file.bert_config(
      values, folder / 'config.json', HUGGING_FACE_ACTIVATIONS, hidden_act)
  stored, file = _read_weights(folder)
  tensors, skipped = _present_names(stored, file)
  kind = _kind(values, tensors)
  wanted = kind if head == 'auto' else head  # what is wrong with another head stops nobody
  if 'masked_lm' in names.GROUPS[wanted]:
    _check_tied(tensors, file)
  return Source(
      path=str(file), folder=folder, style=names.HUGGING_FACE, config=config, tensors=tensors,
      kind=kind, labels=labels or _labels(values, tensors, wanted, folder / 'config.json'),
      facts=_facts(values, tensors, kind), skipped=skipped)


def _check_supported(values: dict[str, Any], path: epath.Path):
  """What would change the computation and is not BERT's."""
  model_type = values.get('model_type', 'bert')  # absent before 2020
  if model_type != 'bert':
    raise ConversionError(f'{path}: model_type is {model_type!r}; bertjax imports BERT (model_type '
                          '"bert") only: other models compute something else')
  position = values.get('position_embedding_type', 'absolute')
  if position != 'absolute':
    raise ConversionError(f'{path}: position_embedding_type is {position!r}; bertjax has absolute '
                          'positions only')
  for name in ('is_decoder', 'add_cross_attention'):
    if values.get(name):
      raise ConversionError(f'{path}: {name} is set; bertjax has no decoders')


def _read_weights(folder: epath.Path) -> tuple[Tensors, epath.Path]:
  """All arrays of the first kind of file that is there, and that file."""
  file = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
  if file is None:
    others = [name for name in _OTHER_WEIGHTS if (folder / name).exists()]
    raise ConversionError(
        f'{folder}: has none of {", ".join(_WEIGHTS)}'
        + (f'; {", ".join(others)} is not read: save the model as model.safetensors' if others
           else ''))
  if not file.name.endswith('.index.json'):
    return _read_file(file), file
  mapping = config_file.read(file).get('weight_map')
  if not isinstance(mapping, dict) or not all(
      isinstance(part, str) and '/' not in part for part in mapping.values()):
    raise ConversionError(f'{file}: has no weight_map of names to files beside it')
  tensors: Tensors = {}
  for part in sorted(set(mapping.values())):
    if not (folder / part).exists():
      raise ConversionError(f'{folder / part}: no such file, but {file.name} lists it')
    tensors |= _read_file(folder / part)
  lost = [f'{name} ({mapping[name]})' for name in mapping if name not in tensors]
  if lost:
    raise ConversionError(f'{file}: {some(lost)}: listed, but not in the file named there')
  return tensors, file


def _read_file(file: epath.Path) -> Tensors:
  return (safetensors_file if file.suffix == '.safetensors' else torch_file).read(file)


def _present_names(stored: Tensors, file: epath.Path) -> tuple[Tensors, dict[str, list[str]]]:
  """Present-day names with the prefix `bert.`, one array for each; and what was left aside.

  A decoder that differs from what it is tied to in BERT keeps its own name.
  """
  prefix = '' if any(name.startswith('bert.') for name in stored) else 'bert.'
  tensors: Tensors = {}
  skipped: dict[str, list[str]] = {}
  # The decoder last, so that it is the one that differs.
  for given, array in sorted(stored.items(), key=lambda item: item[0].startswith(_DECODER)):
    if _BUFFERS.search(given):
      skipped.setdefault('buffers, not parameters', []).append(given)
      continue
    bare = given.startswith(('embeddings.', 'encoder.', 'pooler.'))
    name = prefix + given if bare else given
    for pattern, spelling in _SPELLINGS:
      name = pattern.sub(spelling, name)
    if name not in tensors:
      tensors[name] = array
      continue
    if tensors[name].shape == array.shape and np.array_equal(tensors[name], array):
      skipped.setdefault('equal copies', []).append(given)
    elif given.startswith(_DECODER):
      tensors[given] = array
    else:
      raise ConversionError(f'{file}: {given} differs from another copy of {name}; bertjax keeps '
                            'one parameter for both')
  return tensors, skipped


def _check_tied(tensors: Tensors, file: epath.Path):
  """Refuses a masked-LM head with an output matrix or bias of its own."""
  for pattern, name in _SPELLINGS:
    given = next((given for given in tensors if pattern.search(given)), None)
    if given:
      raise ConversionError(f'{file}: {given} differs from another copy of {name}; bertjax keeps '
                            'one parameter for both (tied): --head encoder imports the model '
                            'without its head')


def _kind(values: dict[str, Any], tensors: Tensors) -> str:
  """The kind of head, by what is stored; config.json tells classifiers apart."""
  architecture = (values.get('architectures') or [''])[0]
  if 'qa_outputs.weight' in tensors:
    return 'span'
  if 'classifier.weight' in tensors:
    for kind in ('tagging', 'choice'):
      if architecture == _ARCHITECTURES[kind][0]:
        return kind
    for kind, (_, problem) in _ARCHITECTURES.items():
      if problem is not None and values.get('problem_type') == problem:
        return kind
    return 'regression' if len(tensors['classifier.weight']) == 1 else 'classification'
  return 'pretraining' if any(name.startswith('cls.predictions.') for name in tensors) else (
      'encoder')


def _facts(values: dict[str, Any], tensors: Tensors, kind: str) -> dict[str, Any]:
  """What our export said of the task; {} if the head was changed since (others keep our key)."""
  facts = dict(values.get(_TASK_FACTS) or {})
  head = facts.get('config', {'kind': kind})
  changed = head['kind'] != kind or (
      kind in LABELLED and head.get('num_outputs', 0) not in (0, len(tensors['classifier.weight'])))
  return {} if changed else facts


def _labels(values: dict[str, Any], tensors: Tensors, kind: str, path: epath.Path) -> list[str]:
  """The names of the classifier's outputs."""
  if kind not in LABELLED or 'classifier.weight' not in tensors:
    return []
  number = len(tensors['classifier.weight'])
  stored = values.get('id2label')
  if stored is None:
    return [f'LABEL_{index}' for index in range(number)]
  if not isinstance(stored, dict) or set(stored) != {str(index) for index in range(number)}:
    raise ConversionError(f'{path}: id2label names {some(map(str, stored))}, but classifier.weight '
                          f'has {number} outputs, 0 to {number - 1}; name them with --labels, or '
                          'import the model without its head: --head encoder')
  return [str(stored[str(index)]) for index in range(number)]


def write(folder: epath.Path, params: dict[str, Any], config: BertConfig, head: dict[str, Any],
          pad_id: int, dtype: Any) -> list[str]:
  """Writes config.json and model.safetensors; the tokenizer's files are the caller's affair.

  Args:
    folder: an empty folder.
    params: our parameters.
    config: the sizes.
    head: 'kind', 'labels' and task facts, as in the metadata of a checkpoint.
    pad_id: the padding token.
    dtype: float32 or bfloat16.

  Returns:
    What to tell the user.

  Raises:
    ConversionError: a head or activation that Transformers does not have.
  """
  kind = head['kind']
  present = parameters.groups_of(params)
  groups, architecture = _architecture(kind, present)
  tensors = parameters.spread(params, names.HUGGING_FACE, config, groups,
                              lambda array: np.ascontiguousarray(array, dtype))
  values = {
      'architectures': [architecture], 'model_type': 'bert',
      **config_file.sizes(config, HUGGING_FACE_ACTIVATIONS),
      'position_embedding_type': 'absolute', 'tie_word_embeddings': True,
      'pad_token_id': pad_id, 'torch_dtype': np.dtype(dtype).name,
  }
  if kind in LABELLED:
    labels = _label_names(head, len(tensors['classifier.weight']))
    values |= {'id2label': {str(index): name for index, name in enumerate(labels)},
               'label2id': {name: index for index, name in enumerate(labels)}}
  if _ARCHITECTURES.get(kind, ('', None))[1]:
    values['problem_type'] = _ARCHITECTURES[kind][1]
  facts = {name: fact for name, fact in head.items() if name not in ('kind', 'labels')}
  if facts:
    values[_TASK_FACTS] = facts
  safetensors_file.write(folder / 'model.safetensors', tensors)
  text = json.dumps(values, indent=2, ensure_ascii=False) + '\n'
  (folder / 'config.json').write_text(text, encoding='utf-8')
  notes = [f'{architecture} with {len(tensors)} variables of {np.dtype(dtype).name}']
  left = [group for group in present if group not in groups]
  return notes + ([f'left out: {", ".join(left)} ({architecture} has none)'] if left else [])


def _architecture(kind: str, present: list[str]) -> tuple[list[str], str]:
  """The groups to write, and the Transformers class that has just these."""
  if kind != 'pretraining':
    return [group for group in names.GROUPS[kind] if group in present], _ARCHITECTURES[kind][0]
  if {'pooler', 'masked_lm', 'next_sentence'} <= set(present):
    return list(names.GROUPS['pretraining']), 'BertForPreTraining'
  if 'masked_lm' in present:
    return ['encoder', 'masked_lm'], 'BertForMaskedLM'
  return [group for group in ('encoder', 'pooler') if group in present], 'BertModel'


def _label_names(head: dict[str, Any], number: int) -> list[str]:
  """A name for each output: label2id needs them to differ."""
  labels = [str(label) for label in head.get('labels') or ()]
  if len(set(labels)) == number == len(labels):
    return labels
  return [f'LABEL_{index}' for index in range(number)]
