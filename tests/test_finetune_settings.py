"""The door of a fine-tuning's configuration: recipes, refusals, what a resume may change."""

import dataclasses
import importlib
import json

import numpy as np
import pytest

from bertjax import model
from bertjax.config import ConfigError
from bertjax.data import examples
from bertjax.finetune import glue, job, settings, squad, swag, tagging

RECIPES = [('glue', 'task=rte', glue.GlueData), ('glue', 'task=custom', glue.GlueData),
           ('squad', 'version=1', squad.SquadData), ('squad', 'version=2', squad.SquadData),
           ('swag', None, swag.SwagData), ('tagging', None, tagging.TaggingData)]


def config(name='glue', argument='task=rte', **changes):
  module = importlib.import_module(f'configs.finetune.{name}')
  values = module.get_config() if argument is None else module.get_config(argument)
  for key, value in changes.items():
    values.update_from_flattened_dict({key.replace('__', '.'): value})
  return values


def read(**changes) -> settings.Settings:
  return settings.from_config(config(**changes), glue.GlueData)


@pytest.mark.parametrize(('name', 'argument', 'data'), RECIPES)
def test_every_recipe_is_whole(name, argument, data):
  values = config(name, argument)
  found = settings.from_config(values, data)
  stored = settings.to_json(found)
  assert json.loads(json.dumps(stored)) == stored
  assert settings.from_config(stored, data) == found  # what a checkpoint holds says it all
  # A recipe spells out what may be set: no field is only in the dataclass.
  assert set(values.data) == {field.name for field in dataclasses.fields(data)}
  optimizer = found.optimizer_settings(1000)
  assert optimizer.bias_correction and (optimizer.num_steps, optimizer.warmup_steps) == (1000, 100)
  assert found.mode == 'train' and found.seq_lengths == ()


def test_recipes_are_the_papers():
  rate = lambda name, argument: config(name, argument).optimizer.learning_rate
  assert (rate('squad', 'version=1'), rate('swag', None)) == (5e-5, 2e-5)
  sizes = lambda version: (config('squad', version).num_epochs, config('squad', version).batch_size)
  assert (sizes('version=1'), sizes('version=2')) == ((3, 32), (2, 48))
  assert (config('swag', None).batch_size, config().batch_size, config().num_epochs) == (16, 32, 3)


@pytest.mark.parametrize('argument', ['rte', 'task=', 'name=rte'])
def test_a_wrong_argument_behind_the_file_is_told_the_right_one(argument):
  with pytest.raises(ValueError, match='write task=VALUE'):
    config('glue', argument)


@pytest.mark.parametrize(('key', 'value', 'message'), [
    ('mode', 'test', "mode is 'test'; it must be one of train, eval, predict"),
    ('batch_size', 0, 'batch_size is 0; it must be at least 1'),
    ('num_epochs', 0, 'num_epochs is 0'),
    ('log_every', 0, 'log_every is 0'),
    ('num_epochs', 2.5, 'num_epochs is 2.5, of type float; int is needed'),
    ('batch_size', '32', "batch_size is '32', of type str"),
    ('accumulate', 3, 'batch_size 32 is not divisible by accumulate 3'),
    ('seq_lengths', (64, 32), 'seq_lengths is .64, 32.; give ascending lengths of at least 8'),
    ('seq_lengths', (32, 32), 'ascending'), ('seq_length', 7, 'at least 8'),
    ('seq_lengths', (32, 64), 'the last of them the seq_length, 128'),
    ('seq_lengths', (4, 32), 'at least 8'), ('seq_lengths', (32.0, 64), 'int is needed'),
    ('warmup_share', 1.0, 'warmup_share is 1.0'), ('warmup_share', -0.1, 'warmup_share'),
    ('data.labels', (None, 'a'), r'data.labels is .None, .a.., .*; .str, .... is needed'),
    ('seed', -1, 'must not be negative'), ('seeds', (0, -2), 'must not be negative'),
    ('seeds', (0, 1.5), r'seeds is \(0, 1.5\); int is needed for each'),
    ('seeds', 'a', 'int is needed'), ('learning_rates', ('2e-5',), 'float is needed for each'),
    ('seeds', (0, 1, 0), r'seeds is \(0, 1, 0\); name each once'),
    ('learning_rates', (2e-5, 2e-5), 'name each once'),
    ('evaluate.patience', -1, 'evaluate.patience must not be negative'),
    ('evaluate.every', -1, 'evaluate.every'), ('evaluate.batch_size', -8, 'evaluate.batch_size'),
    ('checkpoint.every', -1, 'checkpoint.every'), ('checkpoint.keep_last', 0, 'keep_last'),
    ('optimizer.layer_decay', 0.0, 'layer_decay'),
    ('optimizer.freeze', 'head', "optimizer.*freeze is 'head'"),
    ('optimizer.learning_rate', -1.0, 'learning_rate is -1.0'),
])
def test_what_cannot_be_run_is_refused_with_the_mend(key, value, message):
  values = config().to_dict()
  *sections, name = key.split('.')
  section = values
  for part in sections:
    section = section[part]
  section[name] = value
  with pytest.raises(ConfigError, match=message):
    settings.from_config(values, glue.GlueData)


@pytest.mark.parametrize(('section', 'key', 'message'), [
    (None, 'batch_sise', 'unknown key batch_sise; did you mean batch_size?'),
    ('data', 'pth', 'unknown key data.pth; did you mean data.path?'),
    ('optimizer', 'layer_decays', 'unknown key optimizer.layer_decays; did you mean'),
    ('head', 'drop_out', 'unknown key head.drop_out; did you mean head.dropout?'),
    ('evaluate', 'paitence', 'did you mean evaluate.patience'),
])
def test_a_misspelt_key_is_told_the_nearest(section, key, message):
  values = config().to_dict()
  (values[section] if section else values)[key] = 1
  with pytest.raises(ConfigError, match=message):
    settings.from_config(values, glue.GlueData)


def test_one_number_will_do_where_several_may_be_given():
  """--config.seeds=7 arrives as a number."""
  values = config().to_dict() | {'seeds': 7, 'learning_rates': 1e-5, 'seq_lengths': 128}
  found = settings.from_config(values, glue.GlueData)
  assert (found.seeds, found.learning_rates, found.seq_lengths) == ((7,), (1e-5,), (128,))


@pytest.mark.parametrize(('given', 'labels'), [
    ((1, 2, 3), ('1', '2', '3')), ((7,), ('7',)), ((5, True), ('5', 'True')),
    (('neg,pos,0',), ('neg', 'pos', '0')), (('1', 'a'), ('1', 'a'))])
def test_labels_are_names_even_where_they_look_like_numbers(given, labels):
  """As --config.data.labels=1,2,3 and neg,pos,0 arrive."""
  assert read(data__labels=given).data.labels == labels


def test_labels_with_a_point_must_be_quoted():
  """1.50 arrives as 1.5."""
  with pytest.raises(ConfigError, match=r"data.labels is \(1.5, 2\): .*quote them all"):
    read(data__labels=(1.5, 2))
  assert read(data__labels=('1.50', '2')).data.labels == ('1.50', '2')


@pytest.mark.parametrize(('changes', 'num_epochs', 'chosen'), [
    ({}, 1, (8, 32, 128)),  # 31 batches, of which a second length saves 3/8
    ({'batch_size': 64}, 1, (32, 128)), ({'batch_size': 64}, 2, (8, 32, 128)),
    ({'model__attention': 'splash', 'seq_length': 256}, 9, (128, 256)),
    ({'seq_lengths': (64, 128)}, 1, (64, 128))])
def test_lengths_of_rows_suit_all_examples_of_the_run_unless_given(changes, num_epochs, chosen):
  parts = [examples.Examples({'input_ids': [np.zeros(length, np.int32)] * 500}, {})
           for length in (8, 32)]
  assert job.with_lengths(read(**changes), parts, num_epochs).seq_lengths == chosen


def test_pairs_need_a_model_of_two_segments():
  bert = model.BertConfig(vocab_size=128, type_vocab_size=1)
  part = lambda kind: examples.Examples(
      {'input_ids': [np.ones(4, np.int32)], 'token_type_ids': [np.array([0, 0, 0, kind])]}, {})
  job.check_segments(bert, [part(0)])
  with pytest.raises(ConfigError, match='one segment only .* no pairs'):
    job.check_segments(bert, [part(0), part(1)])


@pytest.mark.parametrize(('num_steps', 'share', 'warmup'), [
    (100, 0.1, 10), (3, 0.1, 0), (1, 0.9, 1), (50, 0.0, 0)])
def test_warm_up_is_a_share_of_the_steps(num_steps, share, warmup):
  found = read(warmup_share=share).optimizer_settings(num_steps)
  assert (found.num_steps, found.warmup_steps) == (num_steps, warmup)


# --- Resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(('change', 'key'), [
    ({'seed': 1}, 'seed'), ({'batch_size': 16}, 'batch_size'), ({'num_epochs': 4}, 'num_epochs'),
    ({'seq_length': 64}, 'seq_length'), ({'warmup_share': 0.2}, 'warmup_share'),
    ({'seq_lengths': (32, 128)}, 'seq_lengths'),
    ({'optimizer__learning_rate': 1e-5}, 'optimizer.learning_rate'),
    ({'optimizer__freeze': 'encoder'}, 'optimizer.freeze'),
    ({'head__dropout': 0.0}, 'head.dropout'),
    ({'model__hidden_dropout_prob': 0.0}, 'model.hidden_dropout_prob'),
    ({'evaluate__patience': 3}, 'evaluate.patience'), ({'from_scratch': True}, 'from_scratch'),
    ({'data__max_train_rows': 9}, 'data.max_train_rows'), ({'accumulate': 2}, 'accumulate'),
])
def test_what_would_give_other_weights_is_named(change, key):
  found = settings.differences(settings.to_json(read()), settings.to_json(read(**change)))
  assert len(found) == 1 and found[0].startswith(f'{key}: stored ') and ', now ' in found[0]


@pytest.mark.parametrize('change', [
    {'data__path': 'moved/'}, {'init_from': 'moved/'}, {'log_every': 7}, {'mode': 'eval'},
    {'checkpoint__every': 3}, {'mesh__fsdp': 2}, {'evaluate__batch_size': 64},
    {'model__remat': 'full'}, {'data__test': 'test.tsv'}])
def test_what_gives_the_same_weights_may_change(change):
  assert settings.differences(settings.to_json(read()), settings.to_json(read(**change))) == []


def test_a_key_that_only_one_side_has_is_a_difference():
  stored = settings.to_json(read())
  assert settings.differences(stored | {'old': 1}, stored) == ['old: stored 1, now absent']
