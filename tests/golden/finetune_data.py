"""Weights and batches that test_finetune_parity.py and transformers_finetune.py both make.

NumPy only: the two run in different environments. `RandomState` and uniform numbers for the reason
that parity_data.py gives, whose sizes and encoder weights these are.
"""

import hashlib

import numpy as np
from golden import parity_data

# Kind of head -> outputs of its last layer.
KINDS = {'classification': 3, 'regression': 1, 'multi_label': 4, 'choice': 1, 'tagging': 5,
         'span': 2}
CONFIG = parity_data.CONFIG
# Under the names of bertjax.optim.OptimizerSettings.
OPTIMIZER = parity_data.OPTIMIZER | {
    'learning_rate': 1e-3, 'num_steps': 100, 'bias_correction': True}
BATCH_SIZE, SEQ_LENGTH, NUM_CHOICES = 16, 32, 4
LONGEST = 14  # words of a segment; two of them and three specials leave padding in every row
GROUPS = 5  # of words; the labels depend on them, so that they can be learnt
# Of a row's label being drawn, so that no loss gets so small that rounding is all of it.
NOISE = 0.15
_SEED = 10

Row = dict[str, np.ndarray]


def weights(kind: str) -> dict[str, np.ndarray]:
  """A float32 state dict of Transformers' model with that head; no bias is 0 and no scale 1."""
  without = 'bert.pooler' if kind in ('tagging', 'span') else 'cls'
  found = {name: array for name, array in parity_data.weights().items()
           if name.startswith('bert.') and not name.startswith(without)}
  draw = np.random.RandomState(_SEED)
  head = 'qa_outputs' if kind == 'span' else 'classifier'
  for leaf, shape in (('weight', (KINDS[kind], CONFIG['hidden_size'])), ('bias', KINDS[kind])):
    found[f'{head}.{leaf}'] = draw.uniform(-0.2, 0.2, shape).astype(np.float32)
  return found


def batches(kind: str) -> list[Row]:
  """A batch for every step, in bertjax's format."""
  draw = np.random.RandomState(_SEED + 1 + list(KINDS).index(kind))

  def one():
    rows = [_ROWS[kind](draw) for _ in range(BATCH_SIZE)]
    fields = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return fields | {'weights': np.ones(BATCH_SIZE, np.float32)}

  return [one() for _ in range(OPTIMIZER['num_steps'])]


def digest() -> str:
  """sha256 over every array: stored numbers belong to these weights and batches, or to others."""
  total = hashlib.sha256()
  for kind in KINDS:
    for arrays in (weights(kind), *batches(kind)):
      for name, array in sorted(arrays.items()):
        total.update(f'{kind} {name} {array.dtype} {array.shape}'.encode())
        total.update(array.tobytes())
  return total.hexdigest()


# --- Rows ---------------------------------------------------------------------------------------


def _words(draw: np.random.RandomState, groups) -> np.ndarray:
  """A few words, each of one of these groups."""
  length = draw.randint(3, LONGEST + 1)
  places = draw.randint(0, (CONFIG['vocab_size'] - parity_data.FIRST_ORDINARY) // GROUPS, length)
  chosen = np.asarray(groups)[draw.randint(0, len(groups), length)]
  return parity_data.FIRST_ORDINARY + places * GROUPS + chosen


def _group_of(words: np.ndarray) -> np.ndarray:
  return (words - parity_data.FIRST_ORDINARY) % GROUPS


def _noisy(draw: np.random.RandomState, label: int, num_labels: int) -> int:
  return draw.randint(num_labels) if draw.uniform() < NOISE else label


def _join(first: np.ndarray, second: np.ndarray) -> Row:
  """[CLS] first [SEP] second [SEP] padding."""
  tokens = np.concatenate([
      [parity_data.CLS], first, [parity_data.SEP], second, [parity_data.SEP]])
  row = {name: np.zeros(SEQ_LENGTH, np.int32)
         for name in ('input_ids', 'token_type_ids', 'attention_mask')}
  row['input_ids'][:len(tokens)] = tokens
  row['token_type_ids'][len(first) + 2:len(tokens)] = 1
  row['attention_mask'][:len(tokens)] = 1
  return row


def _classification(draw: np.random.RandomState) -> Row:
  """The label is the group of the first segment."""
  group = draw.randint(KINDS['classification'])
  row = _join(_words(draw, [group]), _words(draw, range(GROUPS)))
  return row | {'labels': np.int32(_noisy(draw, group, KINDS['classification']))}


def _regression(draw: np.random.RandomState) -> Row:
  """The label is the share of the words of one group among the second segment's, times 3."""
  second = _words(draw, [0, draw.randint(GROUPS)])
  share = (_group_of(second) == 0).mean()
  return _join(_words(draw, range(GROUPS)), second) | {'labels': np.float32(3 * share)}


def _multi_label(draw: np.random.RandomState) -> Row:
  """The labels are the groups that the words are of; that of the last one has no label."""
  there = [group for group in range(GROUPS - 1) if draw.randint(2)] or [GROUPS - 1]
  labels = np.isin(np.arange(KINDS['multi_label']), there).astype(np.float32)
  return _join(_words(draw, there), _words(draw, there)) | {'labels': labels}


def _choice(draw: np.random.RandomState) -> Row:
  """The right one of the second segments is of group 0."""
  right = draw.randint(NUM_CHOICES)
  first = _words(draw, range(GROUPS))
  choices = [_join(first, _words(draw, [0] if number == right else range(1, GROUPS)))
             for number in range(NUM_CHOICES)]
  return {name: np.stack([choice[name] for choice in choices]) for name in choices[0]} | {
      'labels': np.int32(_noisy(draw, right, NUM_CHOICES))}


def _tagging(draw: np.random.RandomState) -> Row:
  """The label of a word is its group; a third of them have none, like a word's later pieces."""
  row = _join(_words(draw, range(GROUPS)), _words(draw, range(GROUPS)))
  labelled = (row['input_ids'] >= parity_data.FIRST_ORDINARY) & (draw.randint(0, 3, SEQ_LENGTH) > 0)
  groups = np.where(draw.uniform(size=SEQ_LENGTH) < NOISE, draw.randint(0, GROUPS, SEQ_LENGTH),
                    _group_of(row['input_ids']))
  return row | {'labels': np.where(labelled, groups, 0).astype(np.int32),
                'label_weights': labelled.astype(np.float32)}


def _span(draw: np.random.RandomState) -> Row:
  """The answer is the run of group 0 in the second segment.

  Of sixteen rows about two have no answer, which is at [CLS], and one an answer that is cut off.
  """
  first, second = (_words(draw, range(1, GROUPS)) for _ in range(2))
  begin = draw.randint(len(second))
  end = min(begin + draw.randint(3), len(second) - 1)
  kind = draw.randint(16)
  if kind > 1:
    second[begin:end + 1] -= _group_of(second[begin:end + 1])
  found = len(first) + 2 + np.array([begin, end])
  start, end = (0, 0) if kind < 2 else found + (SEQ_LENGTH if kind == 2 else 0)
  return _join(first, second) | {'start_positions': np.int32(start), 'end_positions': np.int32(end)}


_ROWS = {'classification': _classification, 'regression': _regression,
         'multi_label': _multi_label, 'choice': _choice, 'tagging': _tagging, 'span': _span}
