"""Do exported directories load in Transformers, and do both compute the same? Run by hand.

Needs the extra `parity` (torch, transformers). The two halves may run in two environments:

    python tests/golden/parity_transformers.py ours FOLDER [--weights hf:DIR ...]
    python tests/golden/parity_transformers.py theirs FOLDER

`ours` exports a small random model of every kind of head, and imports and exports each `--weights`
again (cased text: put a tokenizer_config.json beside them). `theirs` loads all of them, and the
original weights too, and exits with 1 if a key is missing or unexpected or a figure differs by more
than 1e-4. What Transformers gives goes, in part, into transformers_heads.json beside this, which
tests/test_convert_parity.py compares in any environment.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

TOLERANCE = 1e-4
STORED = pathlib.Path(__file__).with_name('transformers_heads.json')
SIZES = {'vocab_size': 140, 'hidden_size': 32, 'num_hidden_layers': 3, 'num_attention_heads': 4,
         'intermediate_size': 64, 'max_position_embeddings': 48}
OUTPUTS = {'classification': 3, 'regression': 1, 'multi_label': 4, 'choice': 1, 'tagging': 5}
ACTIVATIONS = ('gelu', 'gelu_tanh', 'relu', 'silu')
CLASSES = {'masked_lm': 'BertForMaskedLM', 'next_sentence': 'BertForPreTraining'}


def batch(vocab_size: int, rows: int = 4, length: int = 40) -> dict[str, np.ndarray]:
  """Rows of different length, two segments each."""
  draw = np.random.RandomState(3)
  lengths = np.linspace(length, length // 3, rows).astype(int)
  mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
  types = (np.arange(length) >= lengths[:, None] // 2) * mask
  return {'input_ids': draw.randint(5, vocab_size, (rows, length)) * mask,
          'token_type_ids': types, 'attention_mask': mask}


def vocabulary(size: int) -> bytes:
  """A vocab.txt of so many entries."""
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  words += [f'w{index}' for index in range(size - len(words))]
  return ('\n'.join(words) + '\n').encode()


def part(array: np.ndarray) -> list[float]:
  """A few numbers of an output, enough to tell a wrong weight: of the first row or tokens."""
  first = array[-1, 0, :2] if array.ndim == 4 else array[0]
  return [round(float(number), 6) for number in np.ravel(first[..., :6])[:12]]


# --- Where bertjax is ------------------------------------------------------------------------


def random_params(config, kind: str):
  """Large weights, no bias 0 and no scale 1, so that none can be mistaken or lost."""
  from bertjax.convert import names, parameters
  draw = np.random.RandomState(1)
  sizes = names.sizes(config) | {'C': OUTPUTS.get(kind, 0)}
  flat = {}
  for variable in names.of(names.GROUPS[kind]):
    shape = [sizes[axis] for axis in variable.axes]
    if variable.stacked:
      shape = [config.num_hidden_layers, *shape]
    array = draw.normal(0, 0.15, shape) + variable.ours.endswith('scale')
    flat[variable.ours] = parameters.resize_vocabulary(
        array.astype(np.float32), variable, config.vocab_size)
  return parameters.nested(flat)


def compute(config, params, inputs) -> dict[str, np.ndarray]:
  """Our hidden states and whatever the heads give, by Transformers' names of outputs."""
  import jax.numpy as jnp
  from flax import nnx

  from bertjax import heads, state
  from bertjax.model import Bert
  flat = {name: value for name, value in params.items() if name != 'bert'}
  with_pooler = 'pooler' in params['bert']
  template, _ = state.split(lambda rngs: Bert(config, rngs, pooler=with_pooler))
  bert = nnx.merge(template, params['bert'])
  rows = [jnp.asarray(inputs[name], jnp.int32)
          for name in ('input_ids', 'token_type_ids', 'attention_mask')]
  every = bert.hidden_states(*rows)
  found = {'hidden_states': every}
  if with_pooler:
    found['pooler_output'] = bert.pool(every[-1][:, 0])
  if 'masked_lm' in flat:
    template, _ = state.split(lambda rngs: heads.MaskedLM(config, rngs))
    head = nnx.merge(template, params['masked_lm'])
    table = jnp.asarray(params['bert']['embeddings']['word_embeddings']['embedding'])
    logits = head(every[-1].reshape(-1, config.hidden_size), table)[:, :config.vocab_size]
    found['prediction_logits'] = logits.reshape(*rows[0].shape, -1)
  for name in ('next_sentence', 'classifier', 'qa_outputs'):
    if name in flat:  # of rows where there is a pooler, else of tokens
      found[name] = found.get('pooler_output', every[-1]) @ flat[name]['kernel'] + (
          flat[name]['bias'])
  return {name: np.asarray(array) for name, array in found.items()}



def write_case(folder: pathlib.Path, workdir, config, params, dtype='float32', origin=''):
  """An exported directory, a batch, and what we compute for it."""
  from bertjax.convert import export
  print(export.export(workdir, 'hf', folder / 'hf', dtype=dtype))
  inputs = batch(config.vocab_size)
  np.savez(folder / 'inputs.npz', **inputs)
  np.savez(folder / 'outputs.npz', **compute(config, params, inputs))
  (folder / 'origin.txt').write_text(origin, encoding='utf-8')


def ours(out: pathlib.Path, weights: list[str]):
  """The first half."""
  import dataclasses

  import jax

  from bertjax import checkpoint
  from bertjax.convert import import_checkpoint, names
  from bertjax.model import BertConfig
  tokenizer = {'vocab.txt': vocabulary(SIZES['vocab_size']),
               'tokenizer_config.json': b'{"do_lower_case": true}'}
  cases = [(kind, 'gelu', 'float32') for kind in names.GROUPS]
  cases += [('pretraining', act, 'float32') for act in ACTIVATIONS[1:]]
  cases += [('pretraining', 'gelu', 'bfloat16')]
  for kind, act, dtype in cases:
    config = BertConfig(**SIZES, hidden_act=act)
    params = random_params(config, kind)
    if dtype == 'bfloat16':  # so that both compute with the same rounded weights
      params = jax.tree.map(lambda a: a.astype('bfloat16').astype(np.float32), params)
    case = out / f'{kind}-{act}-{dtype}'
    head = {'kind': kind, 'labels': [f'label {i}' for i in range(OUTPUTS.get(kind, 0))]}
    checkpoint.save_params(case / 'ours', 0, params, {
        'config': {'model': dataclasses.asdict(config)}, 'head': head}, tokenizer)
    write_case(case, case / 'ours', config, params, dtype)
  for origin in weights:
    imported = import_checkpoint.load(origin)
    print(imported.report)
    case = out / f'weights-{pathlib.Path(origin).name}'
    import_checkpoint.save(imported, case / 'ours')
    config = BertConfig(**imported.metadata['config']['model'])
    write_case(case, case / 'ours', config, imported.params, origin=origin.removeprefix('hf:'))


# --- Where Transformers is -------------------------------------------------------------------


def theirs(out: pathlib.Path) -> int:
  """The second half; the exit code."""
  failed, stored = 0, {}
  for case in sorted(path.parent for path in out.glob('*/outputs.npz')):
    origin = (case / 'origin.txt').read_text(encoding='utf-8')
    for folder in [case / 'hf'] + ([pathlib.Path(origin)] if origin else []):
      wrong, found = check(case, folder, strict=folder == case / 'hf')
      failed += wrong
      stored[case.name] = {name: part(array) for name, array in found.items()}
  STORED.write_text(json.dumps(stored, indent=1).replace('\n   ', ' ').replace('\n  ]', ']')
                    + '\n', encoding='utf-8')
  print('FAILED' if failed else 'all equal', f'within {TOLERANCE}')
  return 1 if failed else 0


def check(
    case: pathlib.Path, folder: pathlib.Path, strict: bool
) -> tuple[bool, dict[str, np.ndarray]]:
  """Loads one directory and compares: whether something is wrong, and what Transformers gives."""
  import torch
  import transformers
  inputs, expected = np.load(case / 'inputs.npz'), np.load(case / 'outputs.npz')
  values = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  name = values['architectures'][0]
  if not hasattr(transformers, name):  # a class of the weights' own package: its encoder and head
    name = 'BertForMaskedLM' if 'prediction_logits' in expected else 'BertModel'
  # sdpa and eager differ in rows without any token only, of which there are none.
  model, loading = getattr(transformers, name).from_pretrained(
      folder, output_loading_info=True, dtype=torch.float32)
  keys = {kind: sorted(loading[kind]) for kind in ('missing_keys', 'unexpected_keys',
                                                   'mismatched_keys')}
  tensors = {key: torch.tensor(value) for key, value in inputs.items()}
  if name == 'BertForMultipleChoice':  # each row as a question of one choice
    tensors = {key: value[:, None] for key, value in tensors.items()}
  with torch.no_grad():
    found = model.eval()(**tensors, output_hidden_states=True)
  pairs = {'hidden_states': torch.stack(found.hidden_states)}
  if name in ('BertForPreTraining', 'BertForMaskedLM'):
    pairs['prediction_logits'] = found[0]
  if name == 'BertForPreTraining':
    pairs['next_sentence'] = found.seq_relationship_logits
  elif name == 'BertForQuestionAnswering':
    pairs['qa_outputs'] = torch.stack([found.start_logits, found.end_logits], -1)
  elif name == 'BertModel':
    pairs['pooler_output'] = found.pooler_output
  elif name != 'BertForMaskedLM':
    pairs['classifier'] = found.logits
  pairs = {key: value.numpy().reshape(expected[key].shape) for key, value in pairs.items()}
  real = inputs['attention_mask'][..., None] > 0
  apart = {}
  for key, value in pairs.items():
    difference = np.abs(value - expected[key])
    per_token = difference.shape[-3:-1] == inputs['input_ids'].shape
    apart[key] = float((difference * real).max() if per_token else difference.max())
  wrong = max(apart.values()) > TOLERANCE or (strict and any(keys.values()))
  labels = model.config.id2label if 'label 0' in model.config.id2label.values() else ''
  tokenizer = transformers.AutoTokenizer.from_pretrained(case / 'hf')
  print(f'{"WRONG" if wrong else "ok"} {case.name} {"exported" if strict else "original"} {name}',
        {key: f'{value:.1e}' for key, value in apart.items()},
        {key: value for key, value in keys.items() if value}, model.config.problem_type or '',
        labels, f'{type(tokenizer).__name__} of {len(tokenizer)}')
  return wrong, pairs


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('half', choices=('ours', 'theirs'))
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--weights', nargs='*', default=[], metavar='hf:DIR')
  args = parser.parse_args()
  return ours(args.folder, args.weights) or 0 if args.half == 'ours' else theirs(args.folder)


if __name__ == '__main__':
  sys.exit(main())
