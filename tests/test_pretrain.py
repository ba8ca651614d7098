"""The whole input pipeline: batches as pure functions of example numbers, and the bug reports."""

import json
import logging
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import (
    TinyVocabulary,
    make_split,
    numbered_documents,
    originals,
    parts,
    random_documents,
    read_documents,
)

from bertjax.data import pipeline, pretrain, sampling, shards, tokenizer

VOCABULARY = TinyVocabulary()
DOCUMENTS = random_documents(0, 40)


def stream_of(documents=DOCUMENTS, vocabulary=VOCABULARY, *, num_shards=1, heldout=False,
              max_examples=None, word_starts=None, **changes):
  values = {'seq_length': 32, **changes}
  return pretrain.ExampleStream(
      make_split(documents, num_shards, word_starts), vocabulary,
      pretrain.PretrainSettings(**values), heldout=heldout, max_examples=max_examples,
  )


def same(x, y):
  assert x.keys() == y.keys()
  for name in x:
    assert x[name].dtype == y[name].dtype
    np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def joined(batches):
  batches = list(batches)
  return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


# --- What a batch is


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6), st.integers(2, 12), st.sampled_from(sampling.TASKS), st.integers(5, 70),
    st.booleans(), st.integers(0, 10**5),
)
def test_structure_on_random_corpora(seed, count, task, seq_length, whole_words, first):
  # Ids from the whole vocabulary, special ones included: candidates are chosen by position.
  documents = random_documents(seed, count, first=0) + [[[10, 11], [12]]]
  stream = stream_of(documents, next_sentence=task, seq_length=seq_length,
                     whole_word_masking=whole_words, seed=seed)
  batch = stream.batch(np.arange(first, first + 16))
  t, p = seq_length, stream.settings.num_predictions
  ids, kinds, real = (batch[k] for k in ('input_ids', 'token_type_ids', 'attention_mask'))
  for name in ('input_ids', 'token_type_ids', 'attention_mask'):
    assert batch[name].shape == (16, t) and batch[name].dtype == np.int32
  for name in ('masked_lm_positions', 'masked_lm_ids', 'masked_lm_weights'):
    assert batch[name].shape == (16, p)
  length = real.sum(1)
  assert (real == (np.arange(t) < length[:, None])).all()
  assert (ids[:, 0] == 2).all() and (ids[np.arange(16), length - 1] == 3).all()
  assert (ids[real == 0] == VOCABULARY.pad_id).all() and (kinds[real == 0] == 0).all()
  special = real == 0
  special[:, 0] = True
  special[np.arange(16), length - 1] = True
  for row in range(16):
    b_tokens = kinds[row].sum()
    if b_tokens:
      assert b_tokens >= 2 and ids[row, length[row] - b_tokens - 1] == 3
      assert length[row] - b_tokens >= 3  # [CLS] A [SEP] with A not empty
      special[row, length[row] - b_tokens - 1] = True
    else:
      assert task != 'nsp' and batch['next_sentence_weights'][row] == 0
    used = batch['masked_lm_weights'][row] > 0
    positions = batch['masked_lm_positions'][row]
    assert (np.diff(positions[used]) > 0).all() and not special[row, positions[used]].any()
    assert used.sum() <= max(1, round(length[row] * 0.15))
    if not whole_words:
      assert used.sum() == min(p, max(1, round(length[row] * 0.15)))
  untouched = np.ones(ids.shape, bool)
  row, slot = np.nonzero(batch['masked_lm_weights'])
  untouched[row, batch['masked_lm_positions'][row, slot]] = False
  assert (originals(batch)[untouched] == ids[untouched]).all()


def test_masked_tokens_restore_the_text():
  documents = numbered_documents([4, 3, 5, 2], sentence_tokens=5)
  flat = np.concatenate([np.asarray(s) for d in documents for s in d])
  batch = stream_of(documents, seq_length=24).batch(np.arange(200))
  for row in range(200):
    for part in parts(batch, row):
      at = np.flatnonzero(flat == part[0])[0]
      assert part == flat[at : at + len(part)].tolist()


def test_layout_is_googles(golden):
  """The 24 instances Google wrote: same fields, kinds, padding and counts as ours have."""
  path = golden / '06_masking' / 'google_tf_examples_128.json'
  for instance in json.loads(path.read_text(encoding='utf-8')):
    ids, start = instance['input_ids'], instance['segment_ids_b_start']
    a, b = np.array(ids[1 : start - 1]), np.array(ids[start:-1])
    # The same pair as two documents of one sentence, read as one example through our layout.
    vocabulary = TinyVocabulary(30522, pad_id=0, cls_id=101, sep_id=102, mask_id=103)
    stream = stream_of([[a], [b, b]], vocabulary, seq_length=128, max_predictions_per_seq=20,
                       short_seq_prob=0.0)
    batch = stream.batch(np.arange(40))
    row = next(i for i in range(40) if parts(batch, i)[0] == a.tolist()
               and len(parts(batch, i)[1]) == len(b))
    google = np.pad(ids, (0, 128 - len(ids)))
    special = np.isin(google, [101, 102]) | (np.arange(128) >= len(ids))
    assert (batch['input_ids'][row][special] == google[special]).all()
    assert batch['token_type_ids'][row].tolist() == [0] * start + [1] * (len(ids) - start) + [0] * (
        128 - len(ids)
    )
    assert batch['attention_mask'][row].sum() == len(ids)
    assert batch['masked_lm_weights'][row].sum() == len(instance['masked_lm_positions'])


# --- A pure function of the example's number


@pytest.mark.parametrize('task', sampling.TASKS)
@pytest.mark.parametrize('whole_words', [False, True])
def test_batch_does_not_depend_on_company_or_order(task, whole_words):
  make = lambda: stream_of(next_sentence=task, whole_word_masking=whole_words)
  stream = make()
  numbers = np.random.default_rng(0).integers(0, 20 * stream.num_examples, 60)
  whole = stream.batch(numbers)
  other = make()  # nothing cached
  same(whole, joined(other.batch(some) for some in np.array_split(numbers, 7)))
  order = np.random.default_rng(1).permutation(60)
  shuffled = make().batch(numbers[order])
  same({name: rows[order] for name, rows in whole.items()}, shuffled)
  same(stream.batch(np.array([], int)), {name: rows[:0] for name, rows in whole.items()})


def test_does_not_depend_on_how_the_corpus_is_cut_into_shards():
  numbers = np.arange(300)
  same(stream_of().batch(numbers), stream_of(num_shards=4).batch(numbers))


def test_every_setting_and_seed_matters():
  base = stream_of().batch(np.arange(50))
  for change in ({'seed': 1}, {'masked_lm_prob': 0.2}, {'next_sentence': 'sop'},
                 {'short_seq_prob': 0.9}, {'whole_word_masking': True}):
    assert (stream_of(**change).batch(np.arange(50))['input_ids'] != base['input_ids']).any()


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_any_number_of_processes_makes_the_same_global_batches(count):
  whole = list(pipeline.batches(stream_of(), 16, 3, 4))
  for number in range(count):
    own = np.arange(number, 16, count)  # scattered, as on a TPU
    for batch, share in zip(whole, pipeline.batches(stream_of(), 16, 3, 4, own), strict=True):
      same({name: rows[own] for name, rows in batch.items()}, share)


def test_b075_resuming_is_a_seek_with_the_same_examples_and_masks():
  straight = list(pipeline.batches(stream_of(), 8, 0, 20))
  resumed = [*pipeline.batches(stream_of(), 8, 0, 7), *pipeline.batches(stream_of(), 8, 7, 13)]
  assert len(straight) == len(resumed) == 20
  for one, other in zip(straight, resumed, strict=True):
    same(one, other)
  # Later epochs are new examples, not the first order again.
  stream = stream_of()
  n = stream.num_examples
  first, second = stream.batch(np.arange(n)), stream.batch(np.arange(n, 2 * n))
  assert (first['input_ids'] != second['input_ids']).any(1).mean() > 0.9


def test_b075_pairs_corpus(bugs):
  tok = tokenizer.load(bugs / 'vocab_tiny.txt', lowercase=False)
  documents = read_documents(bugs / 'corpus_pairs.txt', tok)
  make = lambda: stream_of(documents, tok, seq_length=128)
  straight = list(pipeline.batches(make(), 2, 0, 20))
  resumed = [*pipeline.batches(make(), 2, 0, 7), *pipeline.batches(make(), 2, 7, 13)]
  for one, other in zip(straight, resumed, strict=True):
    same(one, other)


def test_b078_seeking_far_plans_no_more_than_starting(monkeypatch):
  documents = random_documents(1, 200)
  walks = []
  traverse = sampling.traverse
  monkeypatch.setattr(sampling, 'traverse', lambda *a: walks.append(a) or traverse(*a))
  stream_of(documents).batch(np.arange(8))
  near = len(walks)
  walks.clear()
  stream_of(documents).batch(np.arange(8) + 200_000 * 256)
  assert len(walks) <= near + 2


def test_each_epoch_has_new_masks_for_the_same_text():
  documents = [[np.arange(10, 40)], [np.arange(50, 80)]]
  stream = stream_of(documents, next_sentence='none', seq_length=64)
  assert stream.num_examples == 2
  batch = stream.batch(np.arange(200))
  texts = {tuple(row) for row in originals(batch)}
  assert len(texts) == 2
  positions = {tuple(p) for p in batch['masked_lm_positions']}
  assert len(positions) > 150


# --- tf.data


def test_batches_have_static_shapes_and_the_right_examples():
  stream = stream_of()
  got = list(pipeline.batches(stream, 12, 5, 3))
  assert len(got) == 3
  for step, batch in zip(range(5, 8), got, strict=True):
    same(batch, stream.batch(np.arange(step * 12, step * 12 + 12)))


@pytest.mark.slow
def test_a_process_that_leaves_its_pipeline_running_exits(tmp_path):
  """The pipeline's thread calls Python: it must not keep a finished interpreter alive."""
  program = tmp_path / 'leave.py'
  program.write_text(
      'import sys; sys.path.insert(0, sys.argv[1])\n'
      'import numpy as np\n'
      'from small_corpora import TinyVocabulary, make_split, random_documents\n'
      'from bertjax.data import pipeline, pretrain\n'
      'stream = pretrain.ExampleStream(make_split(random_documents(0, 300)), TinyVocabulary(),\n'
      '                                pretrain.PretrainSettings())\n'
      'it = pipeline.batches(stream, 512, 0, 10**9)\n'
      'other = pipeline.batches(stream, 512, 0, 10**9)\n'
      'print(len(next(it)), len(next(other)))\n', encoding='utf-8')
  here = pathlib.Path(__file__).parent
  done = subprocess.run([sys.executable, str(program), str(here)], capture_output=True, timeout=120,
                        env=os.environ | {'PYTHONPATH': str(here.parent)})
  assert done.returncode == 0 and done.stdout.split() == [b'8', b'8'], done.stderr


# --- Held-out data


@pytest.mark.parametrize('batch_size', [1, 5, 8, 13, 64])
def test_b132_every_heldout_example_counts_once(batch_size):
  stream = stream_of(heldout=True, max_examples=13)
  assert stream.num_examples == 13
  rows = joined(pipeline.heldout_batches(stream, batch_size))
  assert len(rows['input_ids']) % batch_size == 0
  same({name: v[:13] for name, v in rows.items()}, stream.batch(np.arange(13)))
  filler = {name: v[13:] for name, v in rows.items()}
  assert (filler.pop('input_ids') == VOCABULARY.pad_id).all()
  assert all((v == 0).all() for v in filler.values())
  assert (rows['next_sentence_weights'][:13] == 1).all()


def test_b132_processes_share_the_heldout_batches():
  whole = list(pipeline.heldout_batches(stream_of(heldout=True, max_examples=13), 8))
  assert len(whole) == 2
  for count in (2, 8):
    for number in range(count):
      own = np.arange(number, 8, count)  # scattered, as on a TPU; some have fillers only
      shares = pipeline.heldout_batches(stream_of(heldout=True, max_examples=13), 8, own)
      for batch, share in zip(whole, shares, strict=True):
        same({name: rows[own] for name, rows in batch.items()}, share)


def test_b133_one_example_is_one_batch():
  (batch,) = pipeline.heldout_batches(stream_of(heldout=True, max_examples=1), 8)
  assert batch['input_ids'].shape == (8, 32) and batch['next_sentence_weights'].sum() == 1


def test_heldout_masks_are_fixed_and_all_examples_are_there():
  stream = stream_of(heldout=True, next_sentence='none')
  n = stream.num_examples
  again = stream_of(heldout=True, next_sentence='none')
  same(stream.batch(np.arange(n)), again.batch(np.arange(n)))
  ids = originals(stream.batch(np.arange(n)))
  assert (ids >= 10).sum() == sum(len(s) for d in DOCUMENTS for s in d)
  with pytest.raises(IndexError):
    stream.batch(np.array([n]))


# --- Bug reports


def load_bug_corpus(bugs, name):
  tok = tokenizer.load(bugs / 'vocab_tiny.txt', lowercase=False)
  return read_documents(bugs / name, tok), tok


@pytest.mark.parametrize('name, documents', [
    ('corpus_double_spaced.txt', 8), ('corpus_onesent_docs.txt', 6)
])
def test_b001_b014_documents_of_one_sentence(bugs, name, documents):
  corpus, tok = load_bug_corpus(bugs, name)
  assert len(corpus) == documents
  with pytest.raises(sampling.SamplingError, match=f"{documents} documents .* 0 of {documents} .*"
                                                    "next_sentence='none'"):
    stream_of(corpus, tok)
  stream = stream_of(corpus, tok, next_sentence='none', seq_length=512)
  assert stream.num_examples == documents
  one_epoch = originals(stream.batch(np.arange(documents)))
  expected = {tuple(np.concatenate(d).tolist()) for d in corpus}
  assert {tuple(r[(r != tok.pad_id)][1:-1].tolist()) for r in one_epoch} == expected


def test_b002_one_document_has_no_other(bugs):
  corpus, tok = load_bug_corpus(bugs, 'corpus_onedoc.txt')
  with pytest.raises(sampling.SamplingError, match='1 document with 6 sentences'):
    stream_of(corpus, tok)


def test_b012_no_example_is_too_long(bugs):
  corpus, tok = load_bug_corpus(bugs, 'corpus_longline.txt')
  for seq_length in (32, 128):
    for task in sampling.TASKS:
      stream = stream_of(corpus, tok, next_sentence=task, seq_length=seq_length)
      batch = stream.batch(np.arange(2 * stream.num_examples))
      for row in range(0, len(batch['input_ids']), 7):
        a, b = parts(batch, row) if batch['token_type_ids'][row].any() else ([1], [1])
        assert a and b
  # Without pairs no word vanishes.
  stream = stream_of(corpus, tok, next_sentence='none', seq_length=32, heldout=True)
  length = stream.batch(np.arange(stream.num_examples))['attention_mask'].sum(1) - 2
  assert length.sum() == sum(len(s) for d in corpus for s in d)


def test_b012_sentences_that_are_cut_are_counted_once(caplog):
  documents = [[np.full(3000, 20), [11]], [[12], np.full(500, 30), [13]], [[14], [15]]]
  with caplog.at_level(logging.INFO):
    stream = stream_of(documents)
  assert stream.statistics.long_sentences == 2 and stream.statistics.complete
  told = [r for r in caplog.records if 'longer than an example' in r.message]
  assert len(told) == 1 and told[0].message.startswith('2 of 7 sentences')
  assert told[0].levelname == 'WARNING'
  # Without pairs nothing is cut, and of held-out text it was said when it was trained on.
  caplog.clear()
  for changes in ({'next_sentence': 'none'}, {'heldout': True}, {'seq_length': 3003}):
    stream_of(documents, **changes)
  assert not any('longer than an example' in message for message in caplog.messages)


def test_very_long_sentences():
  """The twin of B012 without files."""
  documents = [[np.full(3000, 20), [11]], [[12], np.full(500, 30), [13]]]
  for task in sampling.TASKS:
    batch = stream_of(documents, next_sentence=task).batch(np.arange(200))
    for row in np.flatnonzero(batch['token_type_ids'].any(1)):
      a, b = parts(batch, row)
      assert a and b and len(a) + len(b) <= 29


def test_b045_random_partner_is_never_of_the_same_document(bugs):
  corpus, tok = load_bug_corpus(bugs, 'corpus_pairs.txt')
  check_partners(corpus, stream_of(corpus, tok, seq_length=128))


def test_partner_is_never_of_the_same_document():
  """The twin of B045 without files: two-sentence documents, a third of pairs true."""
  corpus = numbered_documents([2] * 5, sentence_tokens=8)
  check_partners(corpus, stream_of(corpus, seq_length=128))


def check_partners(corpus, stream):
  true_next = {tuple(d[0].tolist()): d[1].tolist() for d in corpus}
  batch = stream.batch(np.arange(10 * stream.num_examples))
  random = batch['next_sentence_labels'] == 1
  for row in range(len(random)):
    a, b = parts(batch, row)
    if not random[row]:
      assert true_next[tuple(a)] == b
    else:
      owner = [d for d in corpus if a == d[0].tolist() or a == d[1].tolist()]
      assert len(owner) == 1 and b[: len(owner[0][1])] not in [s.tolist() for s in owner[0]]
  assert abs(random.mean() - 2 / 3) < 0.12


def test_b046_single_sentences_among_pairs(bugs):
  corpus, tok = load_bug_corpus(bugs, 'corpus_pairs.txt')
  single, _ = load_bug_corpus(bugs, 'corpus_onesent_docs.txt')
  stream = stream_of(corpus + single, tok, next_sentence='sop', seq_length=128)
  batch = stream.batch(np.arange(20 * stream.num_examples))
  pairs = {tuple(map(tuple, document)) for document in corpus}
  seen = set()
  for row in range(len(batch['input_ids'])):
    weight, label = batch['next_sentence_weights'][row], batch['next_sentence_labels'][row]
    if batch['token_type_ids'][row].any():
      a, b = map(tuple, parts(batch, row))
      assert weight == 1 and ((b, a) if label else (a, b)) in pairs
      seen.add(label)
    else:
      assert weight == 0 and label == 0
  assert seen == {0, 1}
  assert 0 < stream.statistics.labelled < 1


def test_b046_sentence_order_stays_in_one_document():
  corpus = numbered_documents([2] * 5 + [1] * 6, sentence_tokens=4)
  owner = {int(t): d for d, doc in enumerate(corpus) for s in doc for t in s}
  stream = stream_of(corpus, next_sentence='sop', seq_length=16, short_seq_prob=0.0)
  batch = stream.batch(np.arange(600))
  swapped = []
  for row in range(600):
    weight, label = batch['next_sentence_weights'][row], batch['next_sentence_labels'][row]
    if not batch['token_type_ids'][row].any():
      assert weight == 0 and label == 0
      continue
    a, b = parts(batch, row)
    assert weight == 1 and {owner[t] for t in a} == {owner[t] for t in b}
    assert label == (a[0] > b[0]) and abs(a[0] - b[0]) == 4
    swapped.append(label)
  assert 0.4 < np.mean(swapped) < 0.6
  single = {owner[int(r[1])] for r in originals(batch)[batch['next_sentence_weights'] == 0]}
  assert single == set(range(5, 11))


def test_b048_one_setting_with_names(caplog):
  with caplog.at_level(logging.INFO):
    stream_of(next_sentence='sop')
  assert any('next_sentence=sop' in message for message in caplog.messages)
  with pytest.raises(ValueError, match='must be one of nsp, sop, none'):
    pretrain.PretrainSettings(next_sentence='true')


def test_b040_whole_words_keep_every_field():
  plain, words = (stream_of(whole_word_masking=w).batch(np.arange(9)) for w in (False, True))
  assert {k: (v.shape, v.dtype) for k, v in plain.items()} == {
      k: (v.shape, v.dtype) for k, v in words.items()
  }


def test_b041_given_borders_group_and_their_absence_is_said(caplog):
  """Ideographs, none of which continues a word by its spelling."""
  ideographs = TinyVocabulary()
  ideographs.continuation = np.zeros(100, bool)
  sentence = np.arange(20, 27)  # words: 20 21 22 | 23 | 24 25 | 26
  starts = [True, False, False, True, True, False, True]
  documents, borders = [[sentence, sentence]] * 3, [[starts, starts]] * 3
  with caplog.at_level(logging.INFO):
    stream = stream_of(documents, ideographs, word_starts=borders, whole_word_masking=True,
                       masked_lm_prob=0.3)
    assert not any('word borders' in message for message in caplog.messages)
    stream_of(documents, ideographs, whole_word_masking=True)
  assert sum('no word borders' in message for message in caplog.messages) == 1
  batch = stream.batch(np.arange(100))
  text, seen = originals(batch), set()
  for row in range(100):
    chosen = batch['masked_lm_positions'][row][batch['masked_lm_weights'][row] > 0]
    for word in ((20, 21, 22), (23,), (24, 25), (26,)):
      for start in np.flatnonzero(text[row] == word[0]).tolist():
        if text[row, start : start + len(word)].tolist() == list(word):  # not cut by the length
          hit = np.isin(np.arange(start, start + len(word)), chosen)
          assert hit.all() == hit.any()
          seen |= {word} if hit.all() else set()
  assert len(seen) == 4  # single characters take part


def test_b042_the_cap_follows_from_the_length(caplog):
  derived = [pretrain.PretrainSettings(seq_length=t).num_predictions for t in (128, 512, 20, 384)]
  assert derived == [20, 77, 3, 58]
  documents = random_documents(0, 6, sentences=200, words=60)
  with caplog.at_level(logging.WARNING):
    stream = stream_of(documents, seq_length=512, short_seq_prob=0.0)
    assert not caplog.messages
    capped = stream_of(documents, seq_length=512, max_predictions_per_seq=20, short_seq_prob=0.0)
  assert len(caplog.messages) == 1 and 'max_predictions_per_seq=20' in caplog.messages[0]
  batch = stream.batch(np.arange(100))
  full = batch['attention_mask'].sum(1) == 512
  assert full.sum() > 20 and (batch['masked_lm_weights'][full].sum(1) == 77).all()
  batch = capped.batch(np.arange(400))
  full = batch['attention_mask'].sum(1) == 512
  assert (batch['masked_lm_weights'][full].sum(1) == 20).all()
  quarter = np.bincount(batch['masked_lm_positions'][full].ravel() // 128, minlength=4)
  assert np.abs(quarter / quarter.sum() - 0.25).max() < 0.03


# --- What is said at the start


@pytest.mark.parametrize('task', sampling.TASKS)
@pytest.mark.parametrize('sizes', [[2] * 300, [12] * 500])
def test_statistics_are_those_of_the_examples(task, sizes):
  documents = numbered_documents(sizes, sentence_tokens=3)
  stream = stream_of(documents, next_sentence=task, seq_length=24)
  batch = stream.batch(np.arange(4000))
  found = stream.statistics
  assert abs(found.mean_length - batch['attention_mask'].sum(1).mean()) < 0.8
  assert found.padding == pytest.approx(1 - found.mean_length / 24)
  labelled = batch['next_sentence_weights'] > 0
  assert abs(found.labelled - labelled.mean()) < 0.06
  if labelled.any():
    assert abs(found.label_1 - batch['next_sentence_labels'][labelled].mean()) < 0.06
  if task == 'nsp':  # B045: two thirds on documents of two sentences
    assert abs(found.label_1 - (2 / 3 if sizes[0] == 2 else 0.57)) < 0.06


def test_statistics_of_a_mixture_follow_its_weights():
  short, long = make_split([[[11], [12]]] * 50), make_split([[[13] * 20, [14] * 20]] * 50)
  lengths = [
      pretrain.ExampleStream(
          [short, long], VOCABULARY, pretrain.PretrainSettings(seq_length=64), weights=weights,
      ).statistics.mean_length for weights in ([1.0, 1e-9], [1e-9, 1.0], [1.0, 1.0])
  ]
  assert lengths[0] < 7 and lengths[1] > 40
  assert lengths[2] == pytest.approx((lengths[0] + lengths[1]) / 2, abs=1e-3)


def test_statistics_of_a_large_corpus_read_a_part_of_it():
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 30, 300_000)
  lengths[::100] = 200
  documents = np.cumsum(rng.integers(1, 60, 12_000))
  documents = np.concatenate([[0], documents[documents < len(lengths)], [len(lengths)]])
  tokens = np.full(lengths.sum(), 20, np.uint16)
  shard = shards.Shard(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
                       documents.astype(np.uint32))
  split = shards.Split((shard,), len(documents) - 1, len(lengths), len(tokens))
  settings = pretrain.PretrainSettings()
  stream = pretrain.ExampleStream(split, VOCABULARY, settings)
  found = stream.statistics
  assert not found.complete and 50_000 < found.num_sentences < 70_000
  assert abs(found.long_sentences / found.num_sentences - 0.01) < 1e-3
  rows = stream.batch(np.random.default_rng(1).integers(0, stream.num_examples, 4000))
  assert abs(found.label_1 - rows['next_sentence_labels'].mean()) < 0.04
  assert abs(found.mean_length - rows['attention_mask'].sum(1).mean()) < 4


def test_the_realised_figures_are_logged_once(caplog):
  with caplog.at_level(logging.INFO):
    stream = stream_of()
  told = [message for message in caplog.messages if 'random pairs' in message]
  assert len(told) == 1 and f'{stream.statistics.label_1:.0%} random pairs' in told[0]
  assert f'mean length is {stream.statistics.mean_length:.0f}' in told[0]


@pytest.mark.parametrize('change, message', [
    ({'seq_length': 4}, 'seq_length is 4'), ({'masked_lm_prob': 0.0}, 'masked_lm_prob'),
    ({'short_seq_prob': 1.5}, 'short_seq_prob'), ({'random_words': 'all'}, "'vocabulary'"),
    ({'max_predictions_per_seq': 99, 'seq_length': 32}, 'max_predictions_per_seq is 99'),
    ({'seed': -1}, 'seed is -1'),
])
def test_impossible_settings_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    pretrain.PretrainSettings(**change)


def test_random_words_of_the_whole_vocabulary_are_an_option():
  many = np.arange(3000)
  seen = {}
  for choice in ('ordinary', 'vocabulary'):
    batch = stream_of(random_words=choice).batch(many)
    row, slot = np.nonzero(batch['masked_lm_weights'])
    now = batch['input_ids'][row, batch['masked_lm_positions'][row, slot]]
    seen[choice] = set(now[now != VOCABULARY.mask_id].tolist())
  assert min(seen['ordinary']) >= 10 and seen['vocabulary'] >= {0, 1, 2, 3, 5, 6, 7, 8, 9}
