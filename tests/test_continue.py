"""Pre-training that goes on from an imported encoder: new heads, one's own shards, export again."""

import importlib
import json
import random
import shutil

import pytest
import small_checkpoint as small
from etils import epath

from bertjax import api, checkpoint, errors, pretraining
from bertjax.convert import export, import_checkpoint
from bertjax.data import build
from configs import common

# `continue` is a word of Python's, so the import statement cannot name the module.
recipe = importlib.import_module('configs.continue')


@pytest.fixture(scope='module', autouse=True)
def _quick_programs(tmp_path_factory):
  with small.quick_programs(tmp_path_factory.mktemp('programs')):
    yield


def build_shards(folder, tokenizer):
  """Text in which a word is followed by its neighbour in the list."""
  draw = random.Random(0)
  documents = []
  for _ in range(100):
    firsts = [draw.randrange(len(small.WORDS)) for _ in range(draw.randint(4, 10))]
    documents.append('\n'.join(
        ' '.join(small.WORDS[(first + k) % len(small.WORDS)] for k in range(draw.randint(3, 8)))
        for first in firsts))
  folder.mkdir()
  (folder / 'text.txt').write_text('\n\n'.join(documents), encoding='utf-8')
  assert build.main(['--input', str(folder / 'text.txt'), '--tokenizer', str(tokenizer),
                     '--output', str(folder / 'shards'), '--heldout', '0.1']) == 0
  return folder / 'shards'


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  """An encoder without heads, as of a Hugging Face folder, and shards of its tokenizer."""
  folder = tmp_path_factory.mktemp('home')
  small.make(folder / 'made')
  export.export(folder / 'made', 'hf', folder / 'hf')
  assert import_checkpoint.main(
      ['--from', f'hf:{folder / "hf"}', '--output', str(folder / 'encoder')]) == 0
  build_shards(folder / 'own', checkpoint.tokenizer_folder(folder / 'encoder'))
  return folder


def settings_of(home, shards):
  config = recipe.get_config()
  config.init_from, config.data.path = str(home / 'encoder'), str(shards)
  config.phases = (common.phase(seq_length=32, batch_size=8, num_steps=60),)
  config.model.dtype = 'float32'
  config.optimizer.update({'learning_rate': 3e-3, 'warmup_steps': 5})
  config.heldout.update({'every': 30, 'max_examples': 40})
  config.log_every = 10
  return config


def test_it_begins_with_the_best_run_of_a_sweep(home, tmp_path):
  shutil.copytree(home / 'encoder', tmp_path / 'sweep/lr1_seed0/best')
  records = [{'folder': 'lr1_seed0', 'metric': 'accuracy', 'score': 0.5}]
  (tmp_path / 'sweep/results.json').write_text(json.dumps(records), encoding='utf-8')
  config = small.changed(settings_of(home, home / 'own/shards'), init_from=str(tmp_path / 'sweep'))
  found = pretraining.job(config, epath.Path(tmp_path / 'run'))
  assert found.metadata['config']['model']['hidden_size'] == checkpoint.read_metadata(
      home / 'encoder')['config']['model']['hidden_size']
  assert 'lr1_seed0/best' in found.initial()[1]


@pytest.mark.slow
def test_heads_are_new_the_loss_falls_and_it_goes_out_and_in_again(home, tmp_path, caplog):
  caplog.set_level('INFO', logger='absl')
  workdir = tmp_path / 'run'
  assert checkpoint.read_metadata(home / 'encoder')['missing'] == ['masked_lm', 'next_sentence']
  assert pretraining.run(settings_of(home, home / 'own/shards'), str(workdir)) == 0
  assert f'weights of {home / "encoder"} (step 0), a new schedule; newly initialised: ' \
         'masked_lm, next_sentence' in caplog.text
  # What it began from may be gone when it is started again.
  assert pretraining.run(small.changed(
      settings_of(home, home / 'own/shards'), init_from=str(tmp_path / 'gone')), str(workdir)) == 0
  assert 'Nothing to do' in caplog.text
  before, after = (small.records(workdir, 'heldout')[n]['masked_lm_loss'] for n in (0, -1))
  first = small.records(workdir, 'train')[0]['masked_lm_loss']
  assert after < before < first and after < first - 0.3
  # Out and in again, bit for bit, with a head for masked words.
  export.export(workdir, 'hf', tmp_path / 'hf')
  assert import_checkpoint.main(
      ['--from', f'hf:{tmp_path / "hf"}', '--output', str(tmp_path / 'again')]) == 0
  assert checkpoint.parameter_hash(checkpoint.restore_params(tmp_path / 'again')) == (
      checkpoint.parameter_hash(checkpoint.restore_params(workdir)))
  assert checkpoint.read_metadata(tmp_path / 'again')['missing'] == []
  text = 'river mill [MASK] tower'
  assert api.load(tmp_path / 'again').fill_mask(text) == api.load(workdir).fill_mask(text)


def test_shards_of_another_tokenizer_are_refused(home, tmp_path):
  """The same number of entries, in another order."""
  words = [*small.VOCABULARY[:5], *reversed(small.VOCABULARY[5:])]
  (tmp_path / 'vocab.txt').write_text('\n'.join(words) + '\n', encoding='utf-8')
  shards = build_shards(tmp_path / 'other', tmp_path / 'vocab.txt')
  with pytest.raises(errors.EXPECTED, match=r'another tokenizer.*--tokenizer .*tokenizer') as error:
    pretraining.run(settings_of(home, shards), str(tmp_path / 'run'))
  assert str(checkpoint.tokenizer_folder(home / 'encoder')) in str(error.value)
  assert not (tmp_path / 'run').exists()


def test_other_sizes_are_refused(home, tmp_path):
  config = settings_of(home, home / 'own/shards')
  config.model.hidden_size = 64
  with pytest.raises(errors.EXPECTED, match='the checkpoint does not fit the model'):
    pretraining.run(config, str(tmp_path / 'run'))
