"""From start and end logits of windows to answers, n-best lists and null odds.

The rules are those of google-research/bert, run_squad.py (write_predictions), but for two: an
answer's text is the exact slice of the original context that its tokens cover, never text put
together again from pieces; and positions beyond a window's tokens do not take part, so that the
padding of a batch has no say in what is predicted.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Float, Int

from bertjax.data.encoding import write_files
from bertjax.data.squad import Question, SquadError
from bertjax.data.squad_windows import Windows

# What NaN and infinite logits count as: sums of two stay finite, and so does the JSON.
_LARGEST = float(np.finfo(np.float32).max)

Entry = dict[str, str | float]


@dataclasses.dataclass(frozen=True)
class Answers:
  """What is predicted, by question id and in the questions' order.

  Attributes:
    predictions: the answer; '' for none.
    nbest: the best answers, each with text, probability, start_logit and end_logit.
    null_odds: v2.0: score of no answer minus that of the best answer; None for v1.1. Above the
      threshold the prediction is ''.
    texts: the best answer whatever the odds; '' only where the context has no tokens.
  """

  predictions: dict[str, str]
  nbest: dict[str, list[Entry]]
  null_odds: dict[str, float] | None
  texts: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Candidates:
  """Spans of one question, best first: slices of the context (begin, end) with their logits."""

  begin: Int[np.ndarray, 'N']
  end: Int[np.ndarray, 'N']
  start_logit: Float[np.ndarray, 'N']
  end_logit: Float[np.ndarray, 'N']


def answers(
    windows: Windows, questions: Sequence[Question], outputs: Float[np.ndarray, 'N T 2'],
    version: int, n_best_size: int = 20, max_answer_length: int = 30, null_threshold: float = 0.0,
) -> Answers:
  """The answers that a model's outputs give.

  In each window the n_best_size best starts and ends are paired; a pair counts if it lies in the
  context, starts where the token has its maximal context, and is not longer than
  max_answer_length. The null score of v2.0 is the smallest start + end logit at [CLS] over the
  windows. Where no pair counts, the best of all spans is taken. A question without a window is
  answered ''.

  Args:
    windows: of these questions.
    questions: what the windows were made from.
    outputs: start and end logits at each position; T at least the longest window.
    version: 1, or 2 to allow for no answer.
    n_best_size: entries of an n-best list at most; v2.0 may add one for no answer.
    max_answer_length: tokens of an answer at most.
    null_threshold: v2.0: null odds above it give ''.

  Raises:
    SquadError: outputs that do not fit the windows, sizes below 1.
  """
  _check(windows, questions, outputs, version, n_best_size, max_answer_length)
  outputs = _finite(outputs)
  numbers = np.arange(len(questions) + 1)
  borders = np.searchsorted(windows.question, numbers).tolist()
  nbest: dict[str, list[Entry]] = {}
  texts: dict[str, str] = {}
  null_odds: dict[str, float] = {}
  for number, question in enumerate(questions):
    rows = range(borders[number], borders[number + 1])
    found = _candidates(windows, rows, outputs, n_best_size, max_answer_length)
    null = None
    if version == 2 and len(rows):
      null = min((outputs[row, 0].astype(float).tolist() for row in rows), key=sum)
    nbest[question.id] = _n_best(question.context, found, null, n_best_size)
    texts[question.id], null_odds[question.id] = '', sum(null or [0.0])
    if len(found.begin):
      texts[question.id] = question.context[found.begin[0]:found.end[0]]
      # One after the other, as Google does: the order shows in the last digit.
      null_odds[question.id] -= float(found.start_logit[0])
      null_odds[question.id] -= float(found.end_logit[0])
  predictions = texts if version == 1 else _threshold(texts, null_odds, null_threshold)
  empty = sum(not text for text in texts.values())
  if empty:
    logging.info("SQuAD: %d questions have no token to answer with: predicted ''", empty)
  return Answers(predictions, nbest, null_odds if version == 2 else None, texts)


def write(found: Answers, folder: epath.PathLike) -> None:
  """Writes predictions.json, nbest_predictions.json and (v2.0) null_odds.json, each whole or not.

  The form is that of Google's run_squad.py; the official scripts read it.
  """
  files = {'nbest_predictions.json': found.nbest, 'predictions.json': found.predictions}
  if found.null_odds is None:  # those of an earlier v2.0 model would be taken for these
    (epath.Path(folder) / 'null_odds.json').unlink(missing_ok=True)
  if found.null_odds is not None:
    files = {'null_odds.json': found.null_odds, **files}
  write_files(folder, {
      name: (json.dumps(content, indent=4, allow_nan=False) + '\n').encode('ascii')
      for name, content in files.items()
  })


def _check(
    windows: Windows, questions: Sequence[Question], outputs: Float[np.ndarray, 'N T 2'],
    version: int, n_best_size: int, max_answer_length: int,
) -> None:
  if version not in (1, 2):
    raise SquadError(f'version={version!r} is neither 1 (SQuAD v1.1) nor 2 (SQuAD v2.0)')
  if n_best_size < 1 or max_answer_length < 1:
    raise SquadError(
        f'n_best_size {n_best_size} and max_answer_length {max_answer_length} must be at least 1'
    )
  longest = max(windows.examples.lengths, default=0)
  if len(outputs) != len(windows) or outputs.shape[1] < longest:
    raise SquadError(
        f'outputs {outputs.shape} do not fit {len(windows)} windows of up to {longest} tokens; they'
        ' must be [windows, tokens, 2], in the order of the windows'
    )
  if len(windows) and windows.question[-1] >= len(questions):
    raise SquadError(
        f'windows of {windows.question[-1] + 1} questions do not belong to {len(questions)}; give'
        ' the questions they were made from'
    )


def _finite(outputs: Float[np.ndarray, 'N T 2']) -> Float[np.ndarray, 'N T 2']:
  broken = int(outputs.size - np.isfinite(outputs).sum())
  if not broken:
    return outputs
  logging.warning('SQuAD: %d of %d logits are NaN or infinite; NaN counts as the lowest. Is the'
                  ' model sound?', broken, outputs.size)
  return np.nan_to_num(outputs, nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)


def _candidates(
    windows: Windows, rows: range, outputs: Float[np.ndarray, 'N T 2'], n_best_size: int,
    max_answer_length: int,
) -> _Candidates:
  """The spans of a question's windows, best first."""
  found = []
  for row in rows:
    logits = outputs[row, :len(windows.examples.tokens['input_ids'][row])]
    # Stable, so that of equal logits the earlier position comes first, as with Python's sort.
    best = np.argsort(-logits, axis=0, kind='stable')[:n_best_size]
    starts, ends = np.repeat(best[:, 0], len(best)), np.tile(best[:, 1], len(best))
    found.append(_spans(windows, row, logits, starts, ends, max_answer_length))
  if rows and not any(len(spans.begin) for spans in found):
    for row in rows:
      length = len(windows.examples.tokens['input_ids'][row])
      reach = min(length, max_answer_length)
      starts = np.repeat(np.arange(length), reach)
      ends = starts + np.tile(np.arange(reach), length)
      found.append(_spans(windows, row, outputs[row, :length], starts, ends, max_answer_length))
  return _sorted(found)


def _spans(
    windows: Windows, row: int, logits: Float[np.ndarray, 'L 2'], starts: Int[np.ndarray, 'P'],
    ends: Int[np.ndarray, 'P'], max_answer_length: int,
) -> _Candidates:
  """Those of the pairs of positions that are answers."""
  shift = windows.text_start[row] - windows.first[row]
  counts = (
      (starts >= windows.best_first[row] + shift) & (starts < windows.best_last[row] + shift)
      & (ends < windows.text_start[row] + windows.count[row])
      & (ends >= starts) & (ends < starts + max_answer_length)
  )
  starts, ends = starts[counts], ends[counts]
  offsets = windows.contexts[windows.context[row]].offsets
  first, last = offsets[starts - shift], offsets[ends - shift]
  # A piece that stands for a space alone covers nothing, and neither begins nor ends an answer.
  real = (first[:, 0] < first[:, 1]) & (last[:, 0] < last[:, 1])
  start_logit, end_logit = logits[starts[real], 0], logits[ends[real], 1]
  return _Candidates(
      first[real, 0], last[real, 1], start_logit.astype(float), end_logit.astype(float)
  )


def _sorted(parts: list[_Candidates]) -> _Candidates:
  if not parts:
    none = np.zeros(0, np.int32)
    return _Candidates(none, none, none.astype(float), none.astype(float))
  columns = [
      np.concatenate([getattr(part, field.name) for part in parts])
      for field in dataclasses.fields(_Candidates)
  ]
  order = np.argsort(-(columns[2] + columns[3]), kind='stable')
  return _Candidates(*(column[order] for column in columns))


def _n_best(
    context: str, found: _Candidates, null: list[float] | None, n_best_size: int
) -> list[Entry]:
  """The n-best list: every text once, no answer (`null`: its logits) among them or at the end."""
  entries: list[tuple[str, float, float]] = []
  seen: set[str] = set()
  null_entry = ('', *null) if null else None
  for begin, end, start_logit, end_logit in zip(
      found.begin.tolist(), found.end.tolist(), found.start_logit.tolist(),
      found.end_logit.tolist(), strict=True,
  ):
    if null_entry and '' not in seen and sum(null_entry[1:]) > start_logit + end_logit:
      seen.add('')
      entries.append(null_entry)
    if len(entries) >= n_best_size:
      break
    text = context[begin:end]
    if text not in seen:
      seen.add(text)
      entries.append((text, start_logit, end_logit))
  if null_entry and '' not in seen:
    entries.append(null_entry)
  # A context without tokens: the empty answer is all there is.
  return _with_probabilities(entries or [('', 0.0, 0.0)])


def _with_probabilities(entries: list[tuple[str, float, float]]) -> list[Entry]:
  """Softmax over the entries' summed logits."""
  sums = [start_logit + end_logit for _, start_logit, end_logit in entries]
  highest = max(sums)
  weights = [math.exp(total - highest) for total in sums]
  whole = sum(weights)
  return [
      {'text': text, 'probability': weight / whole, 'start_logit': start, 'end_logit': end}
      for (text, start, end), weight in zip(entries, weights, strict=True)
  ]


def _threshold(
    texts: dict[str, str], null_odds: dict[str, float], null_threshold: float
) -> dict[str, str]:
  return {
      name: '' if null_odds[name] > null_threshold else text for name, text in texts.items()
  }
