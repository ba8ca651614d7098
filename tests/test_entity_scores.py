"""Entity scores against stored results of seqeval, and cases small enough to count by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.evals import entity_scores
from bertjax.evals.entity_scores import Entity, EntityError

TAGS = st.sampled_from(['O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC'])


def golden_cases(golden):
  return json.loads((golden / '05_metrics' / 'ner_seqeval.json').read_text('utf-8'))['cases']


def flat(sentences):
  """Entities as seqeval counts them: over all sentences with an O between them."""
  found, start = [], 0
  for tags in sentences:
    found += [[kind, first + start, last + start]
              for kind, first, last in entity_scores.entities(tags)]
    start += len(tags) + 1
  return found


def close(score, row):
  assert score.precision == pytest.approx(row['precision'], abs=1e-12)
  assert score.recall == pytest.approx(row['recall'], abs=1e-12)
  assert score.f1 == pytest.approx(row['f1-score'], abs=1e-12)
  assert score.support == row['support']


def test_golden_default_mode(golden):
  cases = golden_cases(golden)
  assert len(cases) == 15
  for case in cases:
    found = entity_scores.report(case['gold'], case['pred'])
    assert flat(case['gold']) == case['gold_entities'], case['name']
    assert flat(case['pred']) == case['pred_entities'], case['name']
    assert found.token_accuracy == pytest.approx(case['token_accuracy'], abs=1e-12)
    rows = dict(case['report'])
    close(found.micro, rows.pop('micro avg'))
    close(found.weighted, rows.pop('weighted avg'))
    macro = rows.pop('macro avg')
    if found.macro is None:  # seqeval: nan
      assert case['macro_f1'] != case['macro_f1']
    else:
      close(found.macro, macro)
    assert list(found.types) == list(rows)
    for kind, row in rows.items():
      close(found.types[kind], row)


def test_golden_strict(golden):
  for case in golden_cases(golden):
    if isinstance(case['strict_IOB2_f1'], str):
      with pytest.raises(EntityError, match='neither O nor B- or I-'):
        entity_scores.report(case['gold'], case['pred'], strict=True)
      continue
    found = entity_scores.report(case['gold'], case['pred'], strict=True).micro
    assert found.f1 == pytest.approx(case['strict_IOB2_f1'], abs=1e-12), case['name']
    assert found.precision == pytest.approx(case['strict_IOB2_precision'], abs=1e-12)


@pytest.mark.parametrize('tags, default, strict', [
    ('O B-A I-A I-A O', [('A', 1, 3)], [('A', 1, 3)]),
    ('B-A B-A', [('A', 0, 0), ('A', 1, 1)], [('A', 0, 0), ('A', 1, 1)]),
    ('I-A I-A O I-B', [('A', 0, 1), ('B', 3, 3)], []),
    ('B-A I-B I-A', [('A', 0, 0), ('B', 1, 1), ('A', 2, 2)], [('A', 0, 0)]),
    ('B I O I', [('_', 0, 1), ('_', 3, 3)], [('_', 0, 1)]),
    ('B-A-B I-A-B I-A', [('A-B', 0, 1), ('A', 2, 2)], [('A-B', 0, 1)]),
    ('O O', [], []),
    ('', [], []),
])
def test_entities(tags, default, strict):
  assert entity_scores.entities(tags.split()) == [Entity(*entity) for entity in default]
  assert entity_scores.entities(tags.split(), strict=True) == [Entity(*e) for e in strict]


def test_other_schemes_by_default_and_not_in_strict():
  assert entity_scores.entities(['S-A', 'B-B', 'I-B', 'E-B', 'E-B', 'X', 'I-A']) == [
      Entity('A', 0, 0), Entity('B', 1, 3), Entity('B', 4, 4), Entity('A', 6, 6)]
  with pytest.raises(EntityError, match="'S-A'"):
    entity_scores.entities(['S-A'], strict=True)


def test_counted_by_hand():
  gold = [['B-A', 'I-A', 'O', 'B-B'], ['B-A', 'O']]
  predicted = [['B-A', 'I-A', 'O', 'B-A'], ['O', 'O']]
  found = entity_scores.report(gold, predicted)
  assert found.micro == (1 / 2, 1 / 3, 0.4, 3)
  assert found.types == {'A': (1 / 2, 1 / 2, 1 / 2, 2), 'B': (0, 0, 0, 1)}
  assert found.macro == (1 / 4, 1 / 4, 1 / 4, 3)
  assert found.weighted == pytest.approx((1 / 3, 1 / 3, 1 / 3, 3))
  assert found.token_accuracy == 4 / 6
  assert entity_scores.scores(gold, predicted) == {
      'precision': 1 / 2, 'recall': 1 / 3, 'f1': 0.4, 'token_accuracy': 4 / 6, 'f1/A': 1 / 2,
      'f1/B': 0}


def test_no_entity_at_all():
  found = entity_scores.report([['O']], [['O']])
  assert found.micro == found.weighted == (0, 0, 0, 0)
  assert (found.macro, found.types, found.token_accuracy) == (None, {}, 1)


@pytest.mark.parametrize('gold, predicted, said', [
    ([['O']], [], '0 predicted sentences for 1'),
    ([['O'], ['O', 'O']], [['O'], ['O']], 'sentence 2: 1 predicted tags for 2 tokens'),
    ([], [], 'no tags'),
    ([[]], [[]], 'no tags'),
])
def test_errors(gold, predicted, said):
  with pytest.raises(EntityError, match=said):
    entity_scores.report(gold, predicted)


@given(st.lists(st.lists(TAGS, min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_perfect_prediction_scores_one(gold):
  found = entity_scores.report(gold, gold)
  assert found.token_accuracy == 1
  assert found.micro.f1 == float(found.micro.support > 0)


@given(st.lists(TAGS, max_size=12))
def test_strict_is_default_where_every_entity_begins_with_b(tags):
  mended = []
  for tag in tags:
    before = mended[-1] if mended else 'O'
    mended.append('B' + tag[1:] if tag[0] == 'I' and tag[1:] != before[1:] else tag)
  assert entity_scores.entities(mended) == entity_scores.entities(mended, strict=True)
