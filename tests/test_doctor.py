"""The doctor: sound data passes, each ailment is named with its mend."""

import random

import numpy as np
import pytest

from bertjax.data import build, corpus
from bertjax.tools import doctor

WORDS = ['river', 'mill', 'bell', 'tower', 'boat', 'fog', 'harbor', 'clerk', 'the', 'a', 'runs']
CONFIG = """
from configs import common

def get_config():
  config = common.get_config()
  config.model.hidden_size = 8
  config.model.num_attention_heads = 1
  config.model.num_hidden_layers = 1
  config.model.intermediate_size = 16
  config.model.max_position_embeddings = 64
  config.phases = (common.phase(seq_length=32, batch_size=4, num_steps=100),)
  config.optimizer.warmup_steps = 10
  {change}
  return config
"""


@pytest.fixture(scope='module')
def make_data(tmp_path_factory):
  """Builds shards from documents; the text is [[sentence, ...], ...]."""

  def make(documents, vocabulary=WORDS, **options):
    folder = tmp_path_factory.mktemp('doctor')
    entries = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '.', *vocabulary]
    (folder / 'vocab.txt').write_text('\n'.join(entries) + '\n', encoding='utf-8')
    text = '\n\n'.join('\n'.join(document) for document in documents)
    (folder / 'a.txt').write_text(text, encoding='utf-8')
    build.build(build.BuildSettings(
        inputs=(str(folder / 'a.txt'),), tokenizer=str(folder / 'vocab.txt'),
        output=str(folder / 'shards'), read=corpus.ReadSettings(format='sentences'),
        lowercase=options.pop('lowercase', True), **options))
    return folder / 'shards'

  return make


def random_documents(count, sentences=6):
  rng = random.Random(0)
  return [[' '.join(rng.choices(WORDS, k=rng.randint(3, 9))) + '.' for _ in range(sentences)]
          for _ in range(count)]


@pytest.fixture(scope='module')
def good(make_data):
  return make_data(random_documents(60), heldout=0.1)


@pytest.fixture
def config(tmp_path, request):
  """A configuration file that can import the repository's configs."""

  def write(change=''):
    path = tmp_path / 'configuration.py'
    path.write_text(CONFIG.replace('{change}', change), encoding='utf-8')
    return str(path)

  return write


@pytest.fixture(autouse=True)
def repository_on_path(monkeypatch, request):
  monkeypatch.syspath_prepend(str(request.config.rootpath))


def levels(data, config='', **options):
  findings, shown = doctor.diagnose([str(data)], config, num_examples=300, **options)
  return findings, shown


def problems(data, config='', level='problem', **options):
  return [str(f) for f in levels(data, config, **options)[0] if f.level == level]


def test_sound_data_and_configuration_pass(good, config, capsys):
  assert doctor.main(['--data', str(good), '--config', config(), '--num_examples', '300']) == 0
  printed = capsys.readouterr().out
  assert 'PROBLEM' not in printed and '0 problems' in printed
  for words in ('documents are held out', 'tokens predicted per example', 'of the labels are 1',
                'epochs of', 'sentences per document: mean 6.0', 'example 0', '[CLS]', 'predict'):
    assert words in printed


def test_data_alone_is_judged_too(good):
  findings, shown = levels(good)
  assert not [finding for finding in findings if finding.level == 'problem']
  assert len(shown) == 2


def test_every_finding_that_is_not_ok_has_a_mend(make_data, config):
  findings, _ = levels(make_data([['river mill.']] * 3), config())
  assert any(finding.level != 'ok' for finding in findings)
  assert all(finding.mend for finding in findings if finding.level != 'ok')


def test_damaged_files_are_problems(make_data):
  data = make_data(random_documents(20))
  path = data / 'train-00000-of-00001.tokens.npy'
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)
  assert any('damaged' in text for text in problems(data))
  path.write_bytes(content[:-2])
  assert any('tokens.npy' in text for text in problems(data))


def test_a_changed_tokenizer_is_a_problem(make_data):
  data = make_data(random_documents(20))
  path = data / 'tokenizer' / 'vocab.txt'
  path.write_text(path.read_text(encoding='utf-8') + 'more\n', encoding='utf-8')
  assert any('has been changed since' in text for text in problems(data))


@pytest.mark.parametrize('name', ['nowhere', ''])
def test_no_data_is_a_problem(tmp_path, name, capsys):
  assert doctor.main(['--data', str(tmp_path / name)]) == 1
  assert 'is not a finished data set' in capsys.readouterr().out


def test_b001_b014_one_sentence_documents(make_data, config):
  data = make_data([[' '.join(WORDS[:n])] for n in range(1, 9)])
  found = problems(data, config())
  assert any('one sentence only' in text and 'next_sentence="none"' in text for text in found)
  assert problems(data, config("config.data.next_sentence = 'none'")) == []


def test_b002_one_document(make_data, config):
  data = make_data(random_documents(1))
  assert any("1 documents for next_sentence='nsp'" in text for text in problems(data, config()))


def test_b012_sentences_that_will_be_cut(make_data, good, config):
  documents = random_documents(20)
  for document in documents[:5]:
    document[0] = ' '.join(WORDS * 4) + '.'
  data = make_data(documents, heldout=0.0)
  warnings = problems(data, config(), level='warning')
  assert any('5 of 120 sentences (4.2%) are longer than an example of length 32' in text
             for text in warnings)
  assert not any('longer than' in text for text in problems(good, config(), level='warning'))


def test_b042_too_few_places_for_predictions(good, config):
  change = 'config.phases[0].max_predictions_per_seq = 2'
  warnings = problems(good, config(change), level='warning')
  assert any('room for 2 predictions, 15% of 32 are 4.8' in text for text in warnings)
  assert not any('room for' in text for text in problems(good, config(), level='warning'))


def test_unknown_tokens(make_data):
  data = make_data([[f'unknown{n} words{n} river.', 'mill.'] for n in range(20)])
  assert any('are unknown ([UNK])' in text for text in problems(data))


def test_case_mismatch(make_data):
  data = make_data(random_documents(20), vocabulary=[*WORDS, 'River', 'Mill'], lowercase=True)
  assert any('has capitals' in text for text in problems(data))
  data = make_data(random_documents(20), lowercase=False)
  assert any('left in its case' in text for text in problems(data, level='warning'))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ('config.phases[0].seq_length = 65', 'max_position_embeddings'),
        ('config.model.vocab_size = 7', 'model.vocab_size is 7'),
        ('config.phases = ()', 'phases is empty'),
        ('config.model.hiden_size = 7', 'hiden_size'),
        ('config.data.masked_lm_prob = 1.5', 'masked_lm_prob'),
    ],
)
def test_configurations_that_cannot_run(good, config, change, message):
  assert any(message in text for text in problems(good, config(change)))


def test_a_vocabulary_larger_than_the_tokenizer_is_warned_about(good, config):
  warnings = problems(good, config('config.model.vocab_size = 100'), level='warning')
  assert any('model.vocab_size 100' in text for text in warnings)


def test_many_epochs_are_warned_about(good, config):
  change = 'config.phases[0].num_steps = 100_000'
  assert any('epochs' in text for text in problems(good, config(change), level='warning'))
  assert not any('epochs' in text for text in problems(good, config(), level='warning'))


def test_the_changes_of_the_command_line_count(good, config, capsys):
  command = ['--data', str(good), '--config', config(), '--num_examples', '300']
  assert doctor.main([*command, '--config.phases[0].seq_length=65']) == 1
  assert 'model.max_position_embeddings is 64' in capsys.readouterr().out
  assert doctor.main([*command, '--config.nope=1']) == 1
  assert 'nope' in capsys.readouterr().out
  with pytest.raises(SystemExit):
    doctor.main(['--data', str(good), '--config.phases[0].seq_length=65'])
  with pytest.raises(SystemExit):
    doctor.main([*command[:-1], '0'])


def test_an_argument_that_the_file_does_not_take(good, config):
  assert any('get_config' in text for text in problems(good, f'{config()}:fast'))


def test_several_folders_with_commas(good, capsys):
  assert doctor.main(['--data', f'{good},{good}', '--num_examples', '50']) == 0
  assert capsys.readouterr().out.count('all files are those') == 2


def test_a_held_out_split_without_pairs_is_warned_about(make_data):
  data = make_data([*random_documents(11)], heldout=0.1)
  assert any('held-out documents: ' in text for text in problems(data, level='warning'))


def test_missing_configuration_is_named(good, tmp_path):
  assert any('no configuration file' in text for text in problems(good, 'nowhere.py'))
  empty = tmp_path / 'empty.py'
  empty.write_text('', encoding='utf-8')
  assert any('get_config' in text for text in problems(good, str(empty)))


def test_a_folder_that_the_system_refuses_is_a_problem(good, monkeypatch):
  def refuse(folder):
    raise PermissionError(13, 'Permission denied', str(folder))

  monkeypatch.setattr(doctor.shards, 'load_tokenizer', refuse)
  findings, _ = doctor.diagnose([str(good)])
  assert [f.text for f in findings if f.level == 'problem'] == [
      f"[Errno 13] Permission denied: '{good}'"]


def test_different_tokenizers_do_not_mix(good, make_data):
  other = make_data(random_documents(20), vocabulary=[*WORDS, 'more'])
  findings, _ = doctor.diagnose([str(good), str(other)])
  assert any('different tokenizers' in finding.text for finding in findings)
  findings, shown = doctor.diagnose([str(good), str(good)], num_examples=50)
  assert not any(finding.level == 'problem' for finding in findings) and shown


def test_examples_drawn_are_those_of_the_run(good):
  from bertjax.data import pretrain, shards

  stream = pretrain.ExampleStream(
      shards.open_split(good), shards.load_tokenizer(good), pretrain.PretrainSettings()
  )
  drawn = doctor.draw_examples(stream, 5)
  assert np.array_equal(drawn['input_ids'], stream.batch(np.arange(5))['input_ids'])
