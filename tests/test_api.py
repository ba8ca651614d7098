"""A model from Python: filling in, vectors, and what every kind of head says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_checkpoint as small
from flax import nnx

import bertjax
from bertjax import api, checkpoint, heads, state
from bertjax.data import tokenizer
from bertjax.model import BertConfig

TEXTS = ['river mill bell', 'tower', 'anna smith is red ' * 20, '']
LABELS = {'classification': ('no', 'yes', 'unsure'), 'multi_label': ('red', 'blue'),
          'regression': (), 'choice': (), 'tagging': ('O', 'B-PER', 'I-PER'), 'span': ()}


CONFIG = BertConfig(vocab_size=len(small.VOCABULARY), **small.SIZES)


def make(folder, kind, pooler=True):
  """A checkpoint with random weights; drawn by NumPy, for which nothing is compiled."""
  if kind in LABELS:
    outputs = {'regression': 1, 'choice': 1, 'span': 2}.get(kind, len(LABELS[kind]))
    build = lambda rngs: heads.HEADS[kind](CONFIG, heads.HeadConfig(kind, outputs), rngs)
  elif kind == 'pretraining':
    build = lambda rngs: heads.BertForPreTraining(CONFIG, rngs)
  else:
    build = lambda rngs: heads.BertEncoder(CONFIG, rngs, pooler)
  draw = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: 0.3 * draw.normal(size=leaf.shape).astype(np.float32),
                        state.split(build)[1])
  return small.make(folder, kind, LABELS.get(kind, ()), params=params)


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """A model of each kind, made when it is asked for."""
  home, made = tmp_path_factory.mktemp('models'), {}

  def model(kind):
    if kind not in made:
      made[kind] = api.load(make(home / kind, kind))
    return made[kind]

  return model


@functools.cache
def compiled(graphdef):
  return jax.jit(lambda params, *tokens: nnx.merge(graphdef, params)(*tokens))


def row(model, first, second=None, max_length=64):
  """One text alone as tokens, made here and padded to all that the model takes."""
  tok = model.tokenizer
  ids = [tok.cls_id, *tok.encode(first).ids][:max_length - 1] + [tok.sep_id]
  kinds = [0] * len(ids)
  if second is not None:
    more = [*tok.encode(second).ids, tok.sep_id]
    ids, kinds = ids + more, kinds + [1] * len(more)
  fields = np.full((3, 64), 0, np.int32)
  fields[0] = tok.pad_id
  fields[:, :len(ids)] = ids, kinds, [1] * len(ids)
  return fields


def logits(model, *text, **more):
  """What the head computes for one text alone."""
  ids, kinds, mask = row(model, *text, **more)[:, None]
  return np.asarray(compiled(model.graphdef)(model.params, ids, kinds, mask)[0])


def softmax(x):
  powers = np.exp(x.astype(float) - x.max())
  return powers / powers.sum()


# --- Filling in --------------------------------------------------------------------------------


def test_fill_mask_gives_the_likeliest_tokens_of_each_mask(models):
  model = models('pretraining')
  found = model.fill_mask('river [MASK] bell [MASK]', top=3)
  assert [len(guesses) for guesses in found] == [3, 3]
  tok = model.tokenizer
  ids = [[tok.cls_id, *tok.encode('river [MASK] bell [MASK]', special_text=True).ids, tok.sep_id]]
  ids, positions = np.array(ids, np.int32), np.array([[2, 4]], np.int32)
  scores = compiled(model.graphdef)(
      model.params, ids, np.zeros_like(ids), np.ones_like(ids), positions)[0]
  for guesses, scored in zip(found, np.asarray(scores), strict=True):
    wanted = softmax(scored)
    order = np.argsort(-wanted)[:3]
    assert [guess.token for guess in guesses] == [tok.token(i) for i in order]
    np.testing.assert_allclose([guess.probability for guess in guesses], wanted[order], rtol=1e-4)


def test_all_of_a_small_vocabulary_can_be_asked_for(models):
  """The table is padded to a multiple of 64 or so; those rows are no tokens."""
  [guesses] = models('pretraining').fill_mask('river [MASK]', top=1000)
  assert sorted(guess.token for guess in guesses) == sorted(small.VOCABULARY)
  assert sum(guess.probability for guess in guesses) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(('text', 'message'), [
    ('river mill', r"no \[MASK\] in 'river mill'; write it where"),
    ('[MASK] ' + 'river ' * 70, '73 tokens, but the model takes 64; shorten')])
def test_sentences_that_cannot_be_filled_in(models, text, message):
  with pytest.raises(api.MaskError, match=message):
    models('pretraining').fill_mask(text)


@pytest.mark.parametrize('kind', ['encoder', 'classification'])
def test_without_a_masked_lm_head_nothing_is_filled_in(models, kind):
  with pytest.raises(api.HeadError, match=f'no masked-LM head .its kind is {kind!r}'):
    models(kind).fill_mask('river [MASK]')


# --- Vectors -----------------------------------------------------------------------------------


def test_b066_a_vector_is_the_same_alone_and_in_any_company(models):
  model = models('encoder')
  together = model.encode(TEXTS)
  assert together.shape == (4, 32) and together.dtype == np.float32
  for text, vector in zip(TEXTS, together, strict=True):
    np.testing.assert_allclose(model.encode([text])[0], vector, atol=1e-5)
  again = model.encode(TEXTS[::-1], batch_size=2)[::-1]
  np.testing.assert_allclose(again, together, atol=1e-5)
  assert not np.allclose(together[0], together[1], atol=1e-2)


def test_vectors_are_means_of_hidden_states_without_padding(models):
  model = models('encoder')
  ids, kinds, mask = row(model, 'river mill', 'bell')[:, None, :7]
  assert mask.sum() == 6
  layers = np.asarray(jax.jit(
      lambda params: nnx.merge(model.graphdef, params).bert.hidden_states(
          *map(jnp.asarray, (ids, kinds, mask))))(model.params))[:, 0, :6]
  pair = [('river mill', 'bell')]
  np.testing.assert_allclose(model.encode(pair)[0], layers[-1].mean(0), atol=1e-5)
  np.testing.assert_allclose(
      model.encode(pair, layer=1, pooling='cls')[0], layers[1][0], atol=1e-5)


def test_nothing_to_encode(models):
  assert models('encoder').encode([]).shape == (0, 32)


def test_pooling_that_gives_no_vector(models):
  with pytest.raises(ValueError, match="pooling 'none' gives no vector"):
    models('encoder').encode(['river'], pooling='none')


@pytest.mark.parametrize('kind', ['pretraining', 'classification', 'span'])
def test_every_kind_of_model_encodes(models, kind):
  assert np.isfinite(models(kind).encode(['river', ('mill', 'bell')])).all()


# --- Predictions -------------------------------------------------------------------------------


@pytest.mark.parametrize('batch_size', [1, 32])
def test_classification_gives_names_and_probabilities(models, batch_size):
  model = models('classification')
  found = model.predict(TEXTS, batch_size)
  for text, prediction in zip(TEXTS, found, strict=True):  # the empty one, and one that is cut
    wanted = softmax(logits(model, text))
    assert list(prediction.probabilities) == ['no', 'yes', 'unsure']
    np.testing.assert_allclose(list(prediction.probabilities.values()), wanted, atol=1e-5)
    assert prediction.label == ('no', 'yes', 'unsure')[wanted.argmax()]


def test_pairs_are_read_as_pairs(models):
  model = models('classification')
  pair, joined = ('river mill', 'bell'), 'river mill bell'
  [prediction] = model.predict([pair])
  np.testing.assert_allclose(
      list(prediction.probabilities.values()), softmax(logits(model, *pair)), atol=1e-5)
  assert prediction != model.predict([joined])[0]
  one = dataclasses.replace(model, config=dataclasses.replace(model.config, type_vocab_size=1))
  with pytest.raises(api.InputError, match='one segment only'):
    one.predict([pair])


def test_multi_label_gives_every_name_above_one_half(models):
  model = models('multi_label')
  found = model.predict(TEXTS)
  for text, prediction in zip(TEXTS, found, strict=True):
    wanted = 1 / (1 + np.exp(-logits(model, text).astype(float)))
    np.testing.assert_allclose(list(prediction.probabilities.values()), wanted, atol=1e-5)
    assert prediction.label == tuple(
        name for name, p in zip(('red', 'blue'), wanted, strict=True) if p > 0.5)


def test_regression_gives_a_number(models):
  model = models('regression')
  found = model.predict(TEXTS)
  np.testing.assert_allclose([prediction.label for prediction in found],
                             [logits(model, text)[0] for text in TEXTS], atol=1e-5)
  assert all(type(prediction.label) is float and prediction.probabilities is None
             for prediction in found)


def test_choice_gives_the_number_of_the_ending(models):
  model = models('choice')
  endings = ['river', 'mill bell tower', '', 'red']
  found = model.predict([('anna is', endings), ('smith', 'who', endings[::-1])])
  inputs = [('anna is', '', endings), ('smith', 'who', endings[::-1])]
  for prediction, (first, second, given) in zip(found, inputs, strict=True):
    choices = [row(model, first, f'{second} {ending}') for ending in given]
    scores = np.asarray(compiled(model.graphdef)(
        model.params, *np.stack(choices, 1)[:, None]))[0]
    np.testing.assert_allclose(prediction.probabilities, softmax(scores), atol=1e-5)
    assert prediction.label == np.argmax(scores)


@pytest.mark.parametrize('endings', [['river', 'mill'], ['a'] * 5, 'abcd'])
def test_choices_of_another_number_are_refused(models, endings):
  """Else the endings of one input would be taken for those of the next."""
  right = ('anna is', ['river', 'mill', 'bell', 'red'])
  with pytest.raises(api.InputError, match='input 1 is .*with 4 endings'):
    models('choice').predict([right, ('anna is', endings)])


def test_tagging_gives_a_tag_for_each_word(models):
  model = models('tagging')
  inputs = ['anna smith is red', '', ['anna', 'smith', 'is', 'red'], 'river ' * 100, 'zzz']
  found = model.predict(inputs)
  assert [len(prediction.label) for prediction in found] == [4, 0, 4, 100, 1]
  assert found[0] == found[2]
  wanted = logits(model, 'anna smith is red')[1:5].argmax(-1)
  assert found[0].label == tuple(LABELS['tagging'][i] for i in wanted)
  assert model.predict(['', ' ']) == [api.Prediction((), None)] * 2


def test_span_gives_a_slice_of_the_context(models):
  model = models('span')
  contexts = ['Anna  Smith is\tred', 'river ' * 200, '', 'bell']
  found = model.predict([('who is it', context) for context in contexts])
  assert all(prediction.label in context
             for prediction, context in zip(found, contexts, strict=True))
  assert found[2].label == '' and found[0].label and found[3].label == 'bell'
  assert model.predict([('who', '')]) == [api.Prediction('', None)]


def test_span_answers_with_what_was_learned_on_dev(models):
  """The threshold, and how long an answer may be."""
  question = [('who is it', 'anna smith is red and blue and green it is')]

  def say(**facts):
    metadata = models('span').metadata
    metadata = metadata | {'head': metadata['head'] | facts}
    return dataclasses.replace(models('span'), metadata=metadata).predict(question)[0].label

  assert say(version=2, null_threshold=-1e9) == ''
  assert say(version=2, null_threshold=1e9) != ''
  assert len(say(version=1, max_answer_length=1).split()) == 1


@pytest.mark.parametrize('kind', LABELS)
def test_b133_no_input_and_one_input(models, kind):
  model = models(kind)
  one = {'choice': ('anna', ['river', 'mill', 'bell', 'red']), 'span': ('who', 'anna')}
  assert model.predict([]) == []
  assert len(model.predict([one.get(kind, 'river')])) == 1


@pytest.mark.parametrize('kind, inputs', [
    ('classification', 'river'), ('classification', [('a', 'b', 'c')]), ('classification', [None]),
    ('span', ['who']), ('span', [('who',)]), ('tagging', [['river', 3]]), ('choice', ['river'])])
def test_inputs_of_another_form_are_refused(models, kind, inputs):
  with pytest.raises(api.InputError, match='input 0 is .* must be|give a list, each'):
    models(kind).predict(inputs)


def test_a_text_is_no_list_of_texts_and_a_generator_is_one(models):
  model = models('classification')
  with pytest.raises(api.InputError, match='give a list'):
    model.encode('river')
  with pytest.raises(api.InputError, match='batch_size is 0'):
    model.predict(['river'], batch_size=0)
  assert len(model.predict(text for text in ('river', 'mill'))) == 2


def test_texts_and_pairs_at_once_are_refused(models):
  with pytest.raises(api.HeadError, match='texts and pairs of texts at once'):
    models('classification').predict(['river', ('mill', 'bell')])


@pytest.mark.parametrize('kind', ['pretraining', 'encoder'])
def test_a_model_that_was_not_fine_tuned_predicts_nothing(models, kind):
  with pytest.raises(api.HeadError, match=f'no head to predict with .its kind is {kind!r}'):
    models(kind).predict(['river'])


# --- Loading -----------------------------------------------------------------------------------


def test_load_by_the_name_of_the_package(tmp_path):
  model = bertjax.load(make(tmp_path / 'run', 'classification'))
  assert model.config.hidden_size == 32 and model.head['kind'] == 'classification'
  assert isinstance(model.tokenizer, tokenizer.Tokenizer)


def test_of_a_fine_tuning_workdir_the_best_model_is_taken(tmp_path):
  make(tmp_path / 'run', 'encoder')
  make(tmp_path / 'run' / 'best', 'classification')
  assert api.load(tmp_path / 'run').head['kind'] == 'classification'
  assert api.load(tmp_path / 'run', step=0).head['kind'] == 'encoder'


def test_a_best_model_whose_save_was_killed_is_passed_over(tmp_path):
  make(tmp_path / 'run', 'encoder')
  (tmp_path / 'run' / 'best' / 'checkpoints' / '5.orbax-checkpoint-tmp-1').mkdir(parents=True)
  assert api.load(tmp_path / 'run').head['kind'] == 'encoder'


def test_an_encoder_without_its_pooler_is_loaded_as_it_is(tmp_path):
  folder = make(tmp_path / 'run', 'encoder', pooler=False)
  model = api.load(folder)
  assert 'pooler' not in model.params['bert']
  jax.tree.map(np.testing.assert_array_equal, model.params, checkpoint.restore_params(folder))


def test_the_length_of_fine_tuning_is_that_of_predicting(tmp_path, models):
  """What a model was never trained on, it is not asked."""
  long = models('classification')
  assert long.max_length == 64
  metadata = dict(long.metadata)
  metadata['config'] = metadata['config'] | {'seq_lengths': [8, 16]}
  short = dataclasses.replace(long, metadata=metadata)
  assert short.max_length == 16
  [prediction] = short.predict(['river ' * 40])
  np.testing.assert_allclose(list(prediction.probabilities.values()),
                             softmax(logits(long, 'river ' * 40, max_length=16)), atol=1e-5)


def test_nothing_there(tmp_path):
  with pytest.raises(checkpoint.CheckpointError, match='does not exist'):
    api.load(tmp_path / 'nowhere')
