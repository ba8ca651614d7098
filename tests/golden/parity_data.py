"""Weights and batches that test_parity.py and transformers_losses.py both make from one seed.

NumPy only: the two run in different environments. `RandomState` because its stream is frozen for
ever, and uniform numbers because they are products and sums: the same bits on every machine.
"""

import hashlib
import json

import numpy as np

SEED = 0
# Sizes under the names that both BertConfigs have.
CONFIG = {
    'vocab_size': 300, 'hidden_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 4,
    'intermediate_size': 128, 'max_position_embeddings': 40, 'type_vocab_size': 2,
    'hidden_act': 'gelu', 'layer_norm_eps': 1e-12, 'hidden_dropout_prob': 0.0,
    'attention_probs_dropout_prob': 0.0,
}
# Under the names of bertjax.optim.OptimizerSettings.
OPTIMIZER = {
    'learning_rate': 3e-3, 'warmup_steps': 10, 'num_steps': 50, 'end_learning_rate': 0.0,
    'power': 1.0, 'weight_decay': 0.01, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-6, 'clip_norm': 1.0,
}
NUM_BATCHES = 5  # taken in turn, so that they are learnt
BATCH_SIZE, SEQ_LENGTH, MAX_PREDICTIONS = 16, 32, 5
PAD, CLS, SEP, MASK, FIRST_ORDINARY = 0, 2, 3, 4, 5
TOPICS, TOPIC_SIZE = 29, 10  # a sentence draws its tokens from one topic


def save(output, script: str, packages, data, result: dict) -> None:
  """Writes what a script made, a line for each key, with all that it was made from."""
  result = {
      'made_by': f'tests/golden/{script}',
      'versions': {package.__name__: package.__version__ for package in packages},
      'config': data.CONFIG, 'optimizer': data.OPTIMIZER, 'data_sha256': data.digest(), **result}
  lines = ',\n'.join(f'{json.dumps(key)}: {json.dumps(value)}' for key, value in result.items())
  output.write_text(f'{{\n{lines}\n}}\n', encoding='utf-8')


def shapes() -> dict[str, tuple[int, ...]]:
  """The parameters of Transformers' BertForPreTraining, tied ones once; kernels are [out, in]."""
  wide, inner = CONFIG['hidden_size'], CONFIG['intermediate_size']
  found = {
      'bert.embeddings.word_embeddings.weight': (CONFIG['vocab_size'], wide),
      'bert.embeddings.position_embeddings.weight': (CONFIG['max_position_embeddings'], wide),
      'bert.embeddings.token_type_embeddings.weight': (CONFIG['type_vocab_size'], wide),
      'cls.predictions.bias': (CONFIG['vocab_size'],),
  }
  dense = {'bert.pooler.dense': (wide, wide), 'cls.predictions.transform.dense': (wide, wide),
           'cls.seq_relationship': (2, wide)}
  norms = ['bert.embeddings.LayerNorm', 'cls.predictions.transform.LayerNorm']
  for i in range(CONFIG['num_hidden_layers']):
    layer = f'bert.encoder.layer.{i}'
    for name in ('self.query', 'self.key', 'self.value', 'output.dense'):
      dense[f'{layer}.attention.{name}'] = (wide, wide)
    dense[f'{layer}.intermediate.dense'] = (inner, wide)
    dense[f'{layer}.output.dense'] = (wide, inner)
    norms += [f'{layer}.attention.output.LayerNorm', f'{layer}.output.LayerNorm']
  for name, shape in dense.items():
    found |= {f'{name}.weight': shape, f'{name}.bias': shape[:1]}
  for name in norms:
    found |= {f'{name}.weight': (wide,), f'{name}.bias': (wide,)}
  return found


def weights() -> dict[str, np.ndarray]:
  """A float32 state dict; no bias is 0 and no scale 1, so that none can be mistaken or lost."""
  draw = np.random.RandomState(SEED)

  def one(name, shape):
    spread = draw.uniform(-0.1, 0.1, shape)
    return (spread + name.endswith('LayerNorm.weight')).astype(np.float32)

  return {name: one(name, shape) for name, shape in sorted(shapes().items())}


def _row(draw: np.random.RandomState) -> dict[str, np.ndarray]:
  """[CLS] a [SEP] b [SEP] padding; b is of a's topic where the label is 0, of another where 1."""
  label = draw.randint(2)
  topic_a = draw.randint(TOPICS)
  topic_b = (topic_a + label * draw.randint(1, TOPICS)) % TOPICS
  length_a, length_b = draw.randint(3, 15, 2)  # at most 14 + 14 + 3 specials, so one pad at least
  a, b = (FIRST_ORDINARY + topic * TOPIC_SIZE + draw.randint(0, TOPIC_SIZE, length)
          for topic, length in ((topic_a, length_a), (topic_b, length_b)))
  tokens = np.concatenate([[CLS], a, [SEP], b, [SEP]])
  row = {name: np.zeros(SEQ_LENGTH, np.int32)
         for name in ('input_ids', 'token_type_ids', 'attention_mask')}
  row['input_ids'][:len(tokens)] = tokens
  row['attention_mask'][:len(tokens)] = 1
  row['token_type_ids'][length_a + 2:len(tokens)] = 1
  ordinary = np.flatnonzero(row['input_ids'] >= FIRST_ORDINARY)
  # One prediction to the most there may be: unused slots, and rows of unequal weight.
  chosen = np.sort(draw.permutation(ordinary)[:draw.randint(1, MAX_PREDICTIONS + 1)])
  row |= {name: np.zeros(MAX_PREDICTIONS, np.int32)
          for name in ('masked_lm_positions', 'masked_lm_ids')}
  row['masked_lm_positions'][:len(chosen)] = chosen
  row['masked_lm_ids'][:len(chosen)] = row['input_ids'][chosen]
  row['masked_lm_weights'] = (np.arange(MAX_PREDICTIONS) < len(chosen)).astype(np.float32)
  row['input_ids'][chosen] = MASK
  row['next_sentence_labels'] = np.int32(label)
  row['next_sentence_weights'] = np.float32(1)
  return row


def batches() -> list[dict[str, np.ndarray]]:
  """The batches, in bertjax's format."""
  draw = np.random.RandomState(SEED + 1)

  def one():
    rows = [_row(draw) for _ in range(BATCH_SIZE)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

  return [one() for _ in range(NUM_BATCHES)]


def digest() -> str:
  """sha256 over every array: stored numbers belong to these weights and batches, or to others."""
  total = hashlib.sha256()
  for arrays in (weights(), *batches()):
    for name, array in sorted(arrays.items()):
      total.update(f'{name} {array.dtype} {array.shape}'.encode())
      total.update(array.tobytes())
  return total.hexdigest()
