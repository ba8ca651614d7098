"""Precision, recall and F1 of named entities, equal to those of the package seqeval.

An entity counts as found where type, first and last token are those of the gold entity.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class EntityError(ValueError):
  """Tags that cannot be scored; the message says which and what to do."""


class Entity(NamedTuple):
  """One entity of a sentence, from its first to its last token (inclusive)."""

  type: str
  first: int
  last: int


class Score(NamedTuple):
  """Shares from 0 to 1, and how many gold entities stand behind them."""

  precision: float
  recall: float
  f1: float
  support: int


@dataclasses.dataclass(frozen=True)
class Report:
  """All scores of a set of sentences.

  Attributes:
    micro: over all entities, whatever their type.
    types: of each type that is in the gold or the predicted tags, sorted.
    macro: the plain mean over the types; None where there is no entity at all.
    weighted: the mean over the types, weighted by their gold entities; 0 where there are none.
    token_accuracy: share of tokens with the gold tag.
  """

  micro: Score
  types: dict[str, Score]
  macro: Score | None
  weighted: Score
  token_accuracy: float


def entities(tags: Sequence[str], strict: bool = False) -> list[Entity]:
  """The entities of one sentence.

  By default as conlleval and seqeval do: B and S begin an entity, I and E go on with one of the
  same type that is not over, and begin one otherwise; E and S end it. Whatever has another prefix
  is outside. The type of a bare 'B' is '_'.

  With `strict` as seqeval's mode='strict' with scheme=IOB2: an entity is a B and all I of its type
  right after it; any other I belongs to none.

  Args:
    tags: of one sentence, e.g. ['B-PER', 'I-PER', 'O'].
    strict: see above.

  Raises:
    EntityError: with strict, a tag that is neither O nor B or I.
  """
  found: list[Entity] = []
  before = 'O'
  for index, tag in enumerate(tags):
    prefix, kind = tag[:1], tag[1:].removeprefix('-') or '_'
    if strict and prefix not in ('B', 'I', 'O'):
      raise EntityError(f'tag {tag!r} is neither O nor B- or I-; score it without strict')
    if prefix in ('I', 'E') and before in ('B', 'I') and found[-1].type == kind:
      found[-1] = found[-1]._replace(last=index)
    elif prefix in ('B', 'S') or (prefix in ('I', 'E') and not strict):
      found.append(Entity(kind, index, index))
    else:
      prefix = 'O'  # nothing that the next token could go on with
    before = prefix
  return found


def report(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], strict: bool = False
) -> Report:
  """Scores of predicted tags.

  Args:
    gold: tags of each sentence.
    predicted: as many tags for as many sentences.
    strict: see `entities`.

  Raises:
    EntityError: another number of sentences or tags, no tags, or a tag that strict does not take.
  """
  _check(gold, predicted)
  in_gold: collections.Counter[str] = collections.Counter()
  in_predicted: collections.Counter[str] = collections.Counter()
  right: collections.Counter[str] = collections.Counter()
  for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
    there, said = entities(gold_tags, strict), entities(predicted_tags, strict)
    in_gold.update(entity.type for entity in there)
    in_predicted.update(entity.type for entity in said)
    right.update(entity.type for entity in set(there) & set(said))
  types = {kind: _score(right[kind], in_predicted[kind], in_gold[kind])
           for kind in sorted(in_gold.keys() | in_predicted.keys())}
  same = [one == other for gold_tags, predicted_tags in zip(gold, predicted, strict=True)
          for one, other in zip(gold_tags, predicted_tags, strict=True)]
  support = in_gold.total()
  return Report(
      micro=_score(right.total(), in_predicted.total(), support),
      types=types,
      macro=_mean(types, dict.fromkeys(types, 1), support) if types else None,
      weighted=_mean(types, in_gold, support),
      token_accuracy=sum(same) / len(same))


def scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], strict: bool = False
) -> dict[str, float]:
  """The report as flat metrics: precision, recall, f1, token_accuracy, and f1/TYPE of each type.

  Raises:
    EntityError: as `report`.
  """
  full = report(gold, predicted, strict)
  return {
      'precision': full.micro.precision, 'recall': full.micro.recall, 'f1': full.micro.f1,
      'token_accuracy': full.token_accuracy,
      **{f'f1/{kind}': score.f1 for kind, score in full.types.items()},
  }


def _check(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> None:
  if len(gold) != len(predicted):
    raise EntityError(f'{len(predicted)} predicted sentences for {len(gold)} gold ones; score the'
                      ' file that was predicted on')
  for number, (there, said) in enumerate(zip(gold, predicted, strict=True), 1):
    if len(there) != len(said):
      raise EntityError(f'sentence {number}: {len(said)} predicted tags for {len(there)} tokens;'
                        ' score the file that was predicted on')
  if not any(map(len, gold)):
    raise EntityError('there are no tags to score')


def _score(right: int, predicted: int, gold: int) -> Score:
  """Shares; 0 where nothing was predicted or nothing is there, as in seqeval."""
  precision = right / predicted if predicted else 0.0
  recall = right / gold if gold else 0.0
  f1 = 2 * precision * recall / (precision + recall) if right else 0.0
  return Score(precision, recall, f1, gold)


def _mean(types: Mapping[str, Score], weights: Mapping[str, int], support: int) -> Score:
  """Each share averaged over the types."""
  total = sum(weights.values())
  def mean(field: str) -> float:
    weighted = sum(getattr(score, field) * weights[kind] for kind, score in types.items())
    return weighted / total if total else 0.0
  return Score(mean('precision'), mean('recall'), mean('f1'), support)
