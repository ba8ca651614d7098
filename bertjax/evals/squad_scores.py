"""SQuAD scores, the same numbers as the official evaluate-v1.1.py and evaluate-v2.0.py give.

    python -m bertjax.evals.squad_scores --data dev-v2.0.json --predictions predictions.json \\
        --null_odds null_odds.json

The two scripts differ in more than unanswerable questions: where both texts normalise to nothing
v1.1 gives F1 0 and v2.0 gives 1; v1.1 scores a missing prediction 0, v2.0 refuses it.
"""

import argparse
import collections
import json
import math
import re
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from absl import logging
from etils import epath

from bertjax.data import console, squad
from bertjax.data.squad import Question, SquadError

_ARTICLES = re.compile(r'\b(?:a|an|the)\b')
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)

Scores = dict[str, float]


class Best(NamedTuple):
  """A threshold on the null odds and the total it gives."""

  total: float
  threshold: float


def normalise(text: str) -> str:
  """Lower case, without ASCII punctuation and English articles, single spaces."""
  return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_NO_PUNCTUATION)).split())


def exact(gold: str, predicted: str) -> float:
  """1.0 where both normalise to the same text."""
  return float(normalise(gold) == normalise(predicted))


def f1(gold: str, predicted: str, version: int) -> float:
  """Harmonic mean of precision and recall over the words of the normalised texts."""
  gold_words, words = normalise(gold).split(), normalise(predicted).split()
  if version == 2 and not (gold_words and words):
    return float(gold_words == words)
  shared = (collections.Counter(gold_words) & collections.Counter(words)).total()
  if not shared:
    return 0.0
  precision, recall = shared / len(words), shared / len(gold_words)
  return 2 * precision * recall / (precision + recall)


def score_text(question: Question, predicted: str, version: int) -> tuple[float, float]:
  """Exact match and F1 of a prediction: each the best over the gold answers.

  In v2.0 gold answers that normalise to nothing do not count, and a question without others has
  the empty text for its answer.
  """
  golds = [text for text, _ in question.answers]
  if version == 2:
    golds = [text for text in golds if normalise(text)] or ['']
  return max(exact(gold, predicted) for gold in golds), max(
      f1(gold, predicted, version) for gold in golds
  )


def raw_scores(
    questions: Sequence[Question], predictions: Mapping[str, str], version: int
) -> tuple[Scores, Scores]:
  """Exact match and F1 by question id; with version 1 without those that lack a prediction.

  Raises:
    SquadError: with version 2 a question without a prediction, with version 1 one without a gold
      answer, or no questions.
  """
  if not questions:
    raise SquadError('there are no questions to score')
  missing = [question.id for question in questions if question.id not in predictions]
  if version == 2 and missing:
    raise SquadError(
        f'{len(missing)} of {len(questions)} questions have no prediction (the first:'
        f' {", ".join(missing[:5])}); v2.0 needs one for each, "" for no answer'
    )
  if missing:
    logging.warning('%d of %d questions have no prediction and score 0 (the first: %s)',
                    len(missing), len(questions), ', '.join(missing[:5]))
  bare = [question.id for question in questions if not question.answers]
  if version == 1 and bare:
    raise SquadError(
        f'{len(bare)} questions have no gold answer (the first: {", ".join(bare[:5])}); score such'
        ' data as version 2'
    )
  both = {
      question.id: score_text(question, predictions[question.id], version)
      for question in questions if question.id in predictions
  }
  return {name: pair[0] for name, pair in both.items()}, {
      name: pair[1] for name, pair in both.items()
  }


def scores(
    questions: Sequence[Question], predictions: Mapping[str, str], version: int,
    null_odds: Mapping[str, float] | None = None, null_threshold: float = 1.0,
    official_best: bool = False,
) -> dict[str, float | int]:
  """All numbers of the official script of this version, in percent.

  Args:
    questions: as squad.read gives them without training.
    predictions: text by question id; ids that are not asked for are ignored.
    version: 1 or 2.
    null_odds: v2.0 only: score by question id that there is no answer; what is above
      null_threshold is scored as no answer. Brings best thresholds and average precisions.
    null_threshold: the official default of 1.0 suits probabilities; for odds of logits 0.0 or a
      tuned one does.
    official_best: search the best thresholds as evaluate-v2.0.py does, which steps through equal
      null odds one by one and takes the empty start for threshold 0: its best score may be one that
      its threshold does not reach.

  Returns:
    version 1: exact_match, f1, total, missing. Version 2: exact, f1, total, the same with HasAns_
    and NoAns_ where there are such questions; with null_odds best_exact, best_exact_thresh,
    best_f1, best_f1_thresh, pr_exact_ap, pr_f1_ap, pr_oracle_ap.

  Raises:
    SquadError: as raw_scores; null odds with version 1, or not for every question.
  """
  exacts, f1s = raw_scores(questions, predictions, version)
  if version == 1:
    if null_odds is not None:
      raise SquadError('null odds are for version 2: v1.1 has an answer to every question')
    return {
        'exact_match': 100.0 * _total(exacts.values()) / len(questions),
        'f1': 100.0 * _total(f1s.values()) / len(questions),
        'total': len(questions),
        'missing': len(questions) - len(exacts),
    }
  answered = {question.id: bool(question.answers) for question in questions}
  shown = exacts, f1s
  if null_odds is not None:
    null_odds = _asked_odds(null_odds, answered)
    shown = tuple(
        {
            name: float(not answered[name]) if null_odds[name] > null_threshold else score
            for name, score in raw.items()
        }
        for raw in (exacts, f1s)
    )
  result = _means(*shown, list(answered), '')
  result |= _means(*shown, [name for name, has in answered.items() if has], 'HasAns_')
  result |= _means(*shown, [name for name, has in answered.items() if not has], 'NoAns_')
  if null_odds is not None:
    for name, raw in (('exact', exacts), ('f1', f1s)):
      best = _best(raw, predictions, answered, null_odds, official_best)
      result[f'best_{name}'] = 100.0 * best.total / len(questions)
      result[f'best_{name}_thresh'] = best.threshold
    result |= _average_precisions(exacts, f1s, answered, null_odds)
  return result


def best_threshold(
    gains: Mapping[str, float], base: float, null_odds: Mapping[str, float]
) -> Best:
  """The threshold with the highest total: questions whose odds are not above it are answered.

  Equal odds are on the same side of every threshold, so the total is one that the threshold
  reaches. Of equal totals the lowest threshold counts, where fewest questions are answered.

  Args:
    gains: by question id, what answering adds to the total.
    base: the total when nothing is answered.
    null_odds: by question id.
  """
  order = sorted(gains, key=null_odds.__getitem__)
  lowest = null_odds[order[0]] if order else 0.0
  # Nothing is answered below the lowest odds; 0 is the plainer number where it does as well.
  best = Best(base, 0.0 if lowest > 0 else math.nextafter(lowest, -math.inf))
  total = base
  for number, name in enumerate(order):
    total += gains[name]
    border = number + 1 == len(order) or null_odds[order[number + 1]] != null_odds[name]
    if border and total > best.total:
      best = Best(total, null_odds[name])
  return best


def _best(
    raw: Scores, predictions: Mapping[str, str], answered: Mapping[str, bool],
    null_odds: Mapping[str, float], official: bool,
) -> Best:
  base = float(sum(not has for has in answered.values()))
  if not official:
    return best_threshold(
        {name: score - (not answered[name]) for name, score in raw.items()}, base, null_odds
    )
  best, total = Best(base, 0.0), base
  for name in sorted(null_odds, key=null_odds.__getitem__):
    # Without an answer in the data any text at all costs 1, even one that normalises to nothing.
    total += raw[name] if answered[name] else -float(bool(predictions[name]))
    if total > best.total:
      best = Best(total, null_odds[name])
  return best


def _average_precisions(
    exacts: Scores, f1s: Scores, answered: Mapping[str, bool], null_odds: Mapping[str, float]
) -> dict[str, float | int]:
  """Area under precision over recall as the threshold rises; {} where nothing has an answer."""
  relevant = sum(answered.values())
  if not relevant:
    return {}
  order = sorted(null_odds, key=null_odds.__getitem__)
  oracle = {name: float(has) for name, has in answered.items()}
  result: dict[str, float | int] = {}
  for kind, raw in (('exact', exacts), ('f1', f1s), ('oracle', oracle)):
    found, recall_before, area = 0.0, 0.0, 0.0
    for number, name in enumerate(order):
      found += raw[name] if answered[name] else 0.0
      if number + 1 == len(order) or null_odds[order[number + 1]] != null_odds[name]:
        recall = found / relevant
        area += found / (number + 1) * (recall - recall_before)
        recall_before = recall
    result[f'pr_{kind}_ap'] = 100.0 * area
  return result


def _asked_odds(
    null_odds: Mapping[str, float], answered: Mapping[str, bool]
) -> dict[str, float]:
  """The odds of the questions asked, in the file's order, which breaks ties."""
  missing = [name for name in answered if name not in null_odds]
  if missing:
    raise SquadError(
        f'{len(missing)} of {len(answered)} questions have no null odds (the first:'
        f' {", ".join(missing[:5])}); give the null_odds.json written with the predictions'
    )
  return {name: odds for name, odds in null_odds.items() if name in answered}


def _means(
    exacts: Scores, f1s: Scores, names: Sequence[str], prefix: str
) -> dict[str, float | int]:
  if not names:
    return {}
  return {
      f'{prefix}exact': 100.0 * _total(exacts[name] for name in names) / len(names),
      f'{prefix}f1': 100.0 * _total(f1s[name] for name in names) / len(names),
      f'{prefix}total': len(names),
  }


def _total(values: Iterable[float]) -> float:
  """A sum from left to right: `sum` rounds otherwise from Python 3.12 on, in the last digits."""
  total = 0.0
  for value in values:
    total += value
  return total


def read_by_id(path: epath.PathLike, kind: type) -> dict[str, str] | dict[str, float]:
  """A JSON file {question id: text} (kind str) or {question id: number} (kind float).

  Raises:
    SquadError: no such file, not JSON, or something else in it.
  """
  path = epath.Path(path)
  if not path.exists() or path.is_dir():
    raise SquadError(f'{path}: no such file')
  try:
    content = json.loads(path.read_bytes().decode('utf-8-sig'))
  except ValueError as error:
    raise SquadError(f'{path}: not JSON in UTF-8: {error}') from error
  if not isinstance(content, dict):
    raise SquadError(f'{path}: not {{question id: {kind.__name__}}} but a {type(content).__name__}')
  for name, value in content.items():
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if not (isinstance(value, str) if kind is str else number):
      raise SquadError(
          f'{path}: {json.dumps(value)[:60]} stands for question {name!r}, not a'
          f' {"text" if kind is str else "number"}; give the'
          f' {"predictions" if kind is str else "null_odds"}.json of a run'
      )
  return {name: kind(value) for name, value in content.items()}


def main(arguments: list[str] | None = None) -> int:
  """Prints the scores as JSON; 2 with one message for input that cannot be scored."""
  parser = argparse.ArgumentParser(prog='python -m bertjax.evals.squad_scores', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', required=True, help='the gold file, in SQuAD form')
  parser.add_argument('--predictions', required=True, help='JSON {question id: text}')
  parser.add_argument('--null_odds', help='JSON {question id: number}; version 2 only')
  parser.add_argument('--version', type=int, choices=(1, 2),
                      help='1 or 2 (default: what the data look like)')
  parser.add_argument('--null_threshold', type=float, default=1.0,
                      help='null odds above it count as no answer (default 1.0, as official)')
  parser.add_argument('--official_best', action='store_true',
                      help='search the best thresholds as the official script does, one tied'
                      ' question at a time: the score may be one that no threshold reaches')
  args = parser.parse_args(arguments)
  console.log_plainly()
  try:
    version = args.version or squad.detect_version(args.data)
    result = scores(
        squad.read(args.data, version), read_by_id(args.predictions, str), version,
        read_by_id(args.null_odds, float) if args.null_odds else None, args.null_threshold,
        args.official_best,
    )
  except (SquadError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  print(json.dumps(result, indent=2))
  return 0


if __name__ == '__main__':
  sys.exit(main())
