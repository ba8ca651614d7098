"""What is wrong with this data or configuration, before a week of accelerator time is spent.

    python -m bertjax.tools.doctor --data shards/ --config configs/base.py

Prints findings, each ok, warning or PROBLEM with the mend, and a few examples as the model will see
them. Exit status: 0 without problems, 1 with problems, 2 for bad usage. Needs no accelerator.
"""

import argparse
import dataclasses
import pathlib
import runpy
import sys
from collections.abc import Sequence

import numpy as np
from absl import flags, logging
from jaxtyping import Int
from ml_collections import config_flags

from bertjax import settings as settings_lib
from bertjax.data import console, pretrain, sampling, shards
from bertjax.data.encoding import Tokenizer, TokenizerError

_SAMPLE = 2**20  # Sentences, documents and tokens that are looked at, per shard.
_BATCH = 256
# BERT itself made 40 epochs; each draws new masks and pairs.
_MANY_EPOCHS = 100


@dataclasses.dataclass(frozen=True)
class Finding:
  """One thing that was looked at; `mend` says what to do unless the level is 'ok'."""

  level: str
  text: str
  mend: str = ''

  def __str__(self) -> str:
    head = {'ok': 'ok       ', 'warning': 'warning  ', 'problem': 'PROBLEM  '}[self.level]
    return head + self.text + (f'\n         mend: {self.mend}' if self.mend else '')


def _judge(level: str, good: bool, text: str, mend: str) -> Finding:
  """'ok' if good, else the level with the mend."""
  return Finding('ok', text) if good else Finding(level, text, mend)


# --- The data --------------------------------------------------------------------------------


def check_files(folder: str) -> list[Finding]:
  """Every file against the SHA-256 that the manifest records."""
  broken = [Finding('problem', text, 'copy or build again') for text in shards.verify_files(folder)]
  return broken or [Finding('ok', f'{folder}: all files are those of the manifest')]


def check_manifest(manifest: shards.Manifest) -> list[Finding]:
  """Counts, unknown tokens, encoding and the held-out split."""
  findings = []
  for name, split in manifest.splits.items():
    findings.append(Finding(
        'ok', f'{name}: {split.num_documents:,} documents, {split.num_sentences:,} sentences, '
        f'{split.num_tokens:,} tokens in {len(split.files)} shards'))
  findings.append(_judge(
      'warning', manifest.splits['heldout'].num_documents > 0,
      f'{manifest.splits["heldout"].num_documents} documents are held out for evaluation',
      'build with --heldout above 0 and at least ten documents'))
  unknown = manifest.unknown_token_share
  findings.append(_judge(
      'problem' if unknown > 0.25 else 'warning', unknown <= 0.05,
      f'{unknown:.2%} of all tokens are unknown ([UNK])',
      'train a tokenizer on this text, or check language and case of the vocabulary'))
  bad = manifest.encoding['bad_lines']
  findings.append(_judge('warning', not bad, f'{bad} lines held what is not UTF-8',
                         'convert the text to UTF-8 and build again'))
  findings.append(Finding(
      'ok', f'unigram entropy {manifest.unigram_entropy:.3f} nats/token: the masked-LM loss of a '
      f'model that knows nothing else; {manifest.duplicates_dropped:,} duplicates were dropped'))
  return findings


def check_documents(split: shards.Split, next_sentence: str) -> list[Finding]:
  """Lengths of documents and sentences, and whether there is a next sentence to predict."""
  documents = [np.diff(s.documents[: _SAMPLE + 1].astype(np.int64)) for s in split.shards]
  sentences = [np.diff(s.sentences[: _SAMPLE + 1].astype(np.int64)) for s in split.shards]
  if not documents:
    return [Finding('problem', 'the training split is empty', 'build from more text')]
  lengths = np.concatenate(documents)
  findings = [
      Finding('ok', f'sentences per document: {_spread(lengths)}'),
      Finding('ok', f'tokens per sentence: {_spread(np.concatenate(sentences))}'),
  ]
  single = float((lengths == 1).mean())
  if next_sentence == 'none':
    return findings
  findings.append(_judge(
      'problem', split.num_documents > 1, f'{split.num_documents} documents for next_sentence='
      f'{next_sentence!r}',
      'put an empty line between documents and build again, or set data.next_sentence="none"'))
  findings.append(_judge(
      'problem' if single == 1 else 'warning', single <= 0.5,
      f'{single:.1%} of the documents have one sentence only: no true next sentence in them',
      'remove empty lines between sentences and build again, or set data.next_sentence="none"'))
  return findings


def _spread(lengths: Int[np.ndarray, 'N']) -> str:
  low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
  return (f'mean {lengths.mean():.1f}, median {middle:.0f}, 5 % below {low:.0f}, 5 % above '
          f'{high:.0f}, longest {lengths.max():,}')


def check_tokens(split: shards.Split, tokenizer: Tokenizer) -> list[Finding]:
  """Ids outside the vocabulary, special ids from text, and case."""
  special = np.zeros(max(tokenizer.vocab_size, 2**16), bool)
  special[list(tokenizer.special_ids)] = True
  outside = specials = 0
  for shard in split.shards:
    tokens = np.asarray(shard.tokens[:_SAMPLE])
    inside = tokens < tokenizer.vocab_size
    outside += int((~inside).sum())
    specials += int(special[tokens[inside]].sum())
  findings = [
      _judge('problem', not outside, f'{outside} ids lie outside the vocabulary of '
             f'{tokenizer.vocab_size}', 'build again with the tokenizer that is to be used'),
      _judge('problem', not specials, f'{specials} special ids come from the text',
             'build again: text must never give [CLS], [SEP], [MASK] or [PAD]'),
  ]
  lowercase = tokenizer.switches.get('lowercase')
  pieces = [tokenizer.token(int(i)) for i in tokenizer.ordinary_ids]
  capitals = sum(piece != piece.lower() for piece in pieces) / max(len(pieces), 1)
  case = 'lower-cased' if lowercase else 'left in its case'
  text = f'text is {case}; {capitals:.1%} of the vocabulary has capitals'
  if lowercase:
    findings.append(_judge('problem', capitals < 0.01, text,
                           'build with --no_lowercase, or take an uncased vocabulary'))
  else:
    findings.append(_judge('warning', capitals > 0, text,
                           'build with --lowercase, unless the script has no case'))
  return findings


# --- The data seen through a configuration ---------------------------------------------------


def check_examples(
    stream: pretrain.ExampleStream, examples: dict[str, np.ndarray]
) -> list[Finding]:
  """Padding, predictions per row and labels of real examples."""
  settings = stream.settings
  lengths = examples['attention_mask'].sum(axis=1)
  padding = 1 - float(lengths.mean()) / settings.seq_length
  masked = float(examples['masked_lm_weights'].sum(axis=1).mean())
  findings = [
      _judge('warning', padding <= 0.4, f'{len(lengths)} examples of length '
             f'{settings.seq_length}: mean {lengths.mean():.1f} tokens, {padding:.1%} padding',
             'shorter seq_length, or longer documents (are there too many empty lines?)'),
      Finding('ok', f'{masked:.1f} tokens predicted per example, '
              f'{masked / float(lengths.mean()):.1%} of the tokens'),
  ]
  wanted = settings.seq_length * settings.masked_lm_prob
  findings.append(_judge(
      'warning', settings.num_predictions >= int(wanted),
      f'room for {settings.num_predictions} predictions, {settings.masked_lm_prob:.0%} of '
      f'{settings.seq_length} are {wanted:.1f}',
      'max_predictions_per_seq=0 derives it from the length'))
  labelled = examples['next_sentence_weights'] > 0
  if settings.next_sentence != 'none':
    found = stream.statistics
    share = found.long_sentences / found.num_sentences
    findings.append(_judge(
        'warning', share <= 0.01, f'{found.long_sentences:,} of {found.num_sentences:,} sentences '
        f'({share:.1%}) are longer than an example of length {settings.seq_length} and are cut',
        'cut lines into sentences, or a longer seq_length, or data.next_sentence="none"'))
    share = float(examples['next_sentence_labels'][labelled].mean()) if labelled.any() else 1.0
    findings.append(_judge(
        'problem' if share in (0, 1) else 'warning', 0.35 <= share <= 0.75,
        f'next_sentence={settings.next_sentence!r}: {share:.1%} of the labels are 1 (random or '
        f'swapped); always saying the commoner label is right in {max(share, 1 - share):.1%}',
        'documents of more sentences, or data.next_sentence="none"'))
  return findings


def check_schedule(settings: settings_lib.Settings, streams) -> list[Finding]:
  """How often each phase goes through the data, and how many tokens it reads."""
  findings = []
  for number, (phase, stream) in enumerate(zip(settings.phases, streams, strict=True)):
    examples = phase.num_steps * phase.batch_size
    epochs = examples / max(stream.num_examples, 1)
    findings.append(_judge(
        'warning', epochs <= _MANY_EPOCHS,
        f'phase {number}: {phase.num_steps:,} steps of {phase.batch_size} x {phase.seq_length} = '
        f'{examples * phase.seq_length:,} token places, {epochs:.1f} epochs of '
        f'{stream.num_examples:,} examples', 'fewer steps or more text: the model will overfit'))
  return findings


def load_config(
    path: str, data: Sequence[str], changes: Sequence[str] = ()
) -> settings_lib.Settings:
  """The settings in a configuration file, with the data folders in place of its own.

  Args:
    path: the file, with its argument behind a colon.
    data: folders of shards.
    changes: as training takes them, e.g. '--config.optimizer.learning_rate=1e-3'.

  Raises:
    ConfigError: no such file, function or key, or a configuration that cannot be run.
  """
  name, _, argument = path.partition(':')
  if not pathlib.Path(name).is_file():
    raise settings_lib.ConfigError(f'no configuration file {name!r}')
  sys.path.insert(0, str(pathlib.Path(name).resolve().parent.parent))  # for `from configs import`
  try:
    module = runpy.run_path(name)
    if 'get_config' not in module:
      raise settings_lib.ConfigError(f'{name} defines no function get_config()')
    config = module['get_config'](*([argument] if argument else []))
    own, argv = flags.FlagValues(), ['doctor', *changes]
    config_flags.DEFINE_config_dict('config', config, flag_values=own, sys_argv=argv)
    rest = own(argv)[1:]
    config.data.path = ','.join(data)
  except (AttributeError, IndexError, KeyError, TypeError, flags.Error) as error:
    raise settings_lib.ConfigError(f'{path}: {error}') from error
  finally:
    sys.path.pop(0)
  if rest:
    raise settings_lib.ConfigError(f'{" ".join(rest)}: only --config.KEY=VALUE changes it')
  return settings_lib.from_config(config)


def show_examples(examples: dict[str, np.ndarray], tokenizer: Tokenizer, count: int) -> list[str]:
  """The first examples as text: tokens, then what is predicted where."""
  shown = []
  for row in range(min(count, len(examples['input_ids']))):
    length = int(examples['attention_mask'][row].sum())
    tokens = [tokenizer.token(int(i)) for i in examples['input_ids'][row, :length]]
    used = examples['masked_lm_weights'][row] > 0
    places = examples['masked_lm_positions'][row][used]
    words = [tokenizer.token(int(i)) for i in examples['masked_lm_ids'][row][used]]
    answers = ', '.join(f'{place}: {word}' for place, word in zip(places, words, strict=True))
    label = int(examples['next_sentence_labels'][row])
    shown.append(f'example {row} (label {label}): {" ".join(tokens)}\n         predict {answers}')
  return shown


# --- All of it -------------------------------------------------------------------------------


def diagnose(
    data: Sequence[str], config: str = '', num_examples: int = 4096, hashes: bool = True,
    changes: Sequence[str] = (),
) -> tuple[list[Finding], list[str]]:
  """Looks at everything.

  Args:
    data: folders of shards; several are the corpora of one mixture.
    config: path of a configuration file; without one, the data is judged for length 128 and
      next-sentence prediction.
    num_examples: how many examples are made and measured.
    hashes: whether all files are read to compare their SHA-256.
    changes: of the configuration, see `load_config`.

  Returns:
    The findings, and a few examples as text.
  """
  findings: list[Finding] = []
  settings = None
  task = pretrain.PretrainSettings()
  if config:
    try:
      settings = load_config(config, data, changes)
      task = settings.pretrain_settings(0)
      findings.append(Finding('ok', f'{config} is a configuration that can be run'))
    except settings_lib.ConfigError as error:
      findings.append(Finding('problem', f'{config}: {error}', 'as the message says'))
  splits, tokenizers = [], []
  for folder in data:
    try:
      findings += _check_folder(folder, task, hashes, splits, tokenizers)
    except (shards.ShardError, TokenizerError, OSError) as error:
      findings.append(Finding('problem', str(error), 'as the message says'))
  if len(splits) < len(data):
    return findings, []
  if len({tokenizer.hash() for tokenizer in tokenizers}) > 1:
    findings.append(Finding('problem', 'the data sets were built with different tokenizers',
                            'build all of them with the same --tokenizer'))
    return findings, []
  more, shown = _check_configured(settings, task, splits, tokenizers[0], num_examples)
  return findings + more, shown


def _check_heldout(split: shards.Split, tokenizer: Tokenizer, task) -> list[Finding]:
  """Whether the run can evaluate on it as it trains."""
  try:
    pretrain.ExampleStream((split,), tokenizer, task, heldout=True, max_examples=64)
  except sampling.SamplingError as error:
    return [Finding('warning', f'held-out documents: {error}',
                    'build with a larger --heldout, or next_sentence is not evaluated')]
  return []


def _check_folder(folder, task, hashes, splits, tokenizers) -> list[Finding]:
  manifest = shards.load_manifest(folder)
  findings = check_files(folder) if hashes else []
  findings += check_manifest(manifest)
  tokenizer = shards.load_tokenizer(folder)
  split = shards.open_split(folder)
  findings += check_tokens(split, tokenizer) + check_documents(split, task.next_sentence)
  if manifest.splits['heldout'].num_documents:
    findings += _check_heldout(shards.open_split(folder, 'heldout'), tokenizer, task)
  splits.append(split)
  tokenizers.append(tokenizer)
  return findings


def _check_configured(settings, task, splits, tokenizer, num_examples):
  """Findings about the model and the examples of each phase, and examples of the first as text."""
  findings, shown, streams = [], [], []
  tasks, mixture = [task], {}
  if settings:
    data = settings.data
    mixture = {'weights': data.weights or None, 'sampling_exponent': data.sampling_exponent}
    tasks = [settings.pretrain_settings(number) for number in range(len(settings.phases))]
    try:
      bert = settings.bert_config(tokenizer.vocab_size)
      findings.append(_judge(
          'warning', bert.vocab_size == tokenizer.vocab_size,
          f'model.vocab_size {bert.vocab_size}, tokenizer {tokenizer.vocab_size}; longest row '
          f'{max(t.seq_length for t in tasks)} of {bert.max_position_embeddings} positions',
          'leave model.vocab_size out to follow the tokenizer'))
    except settings_lib.ConfigError as error:
      findings.append(Finding('problem', str(error), 'as the message says'))
  for number, each in enumerate(tasks):
    try:
      stream = pretrain.ExampleStream(splits, tokenizer, each, **mixture)
      examples = draw_examples(stream, num_examples)
    except (sampling.SamplingError, ValueError) as error:
      findings.append(Finding('problem', f'phase {number}: {error}', 'as the message says'))
      return findings, shown
    streams.append(stream)
    findings += check_examples(stream, examples)
    shown = shown or show_examples(examples, tokenizer, 2)
  if settings:
    findings += check_schedule(settings, streams)
  return findings, shown


def draw_examples(stream: pretrain.ExampleStream, count: int) -> dict[str, np.ndarray]:
  """The first `count` examples of the stream (at most an epoch), in one batch."""
  count = max(1, min(count, stream.num_examples))
  parts = [
      stream.batch(np.arange(first, min(first + _BATCH, count)))
      for first in range(0, count, _BATCH)
  ]
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.tools.doctor', description=__doc__.split('\n\n')[0]
  )
  parser.add_argument('--data', nargs='+', required=True, help='folders of shards')
  parser.add_argument('--config', default='', help='a configuration, e.g. configs/base.py; '
                      '--config.KEY=VALUE changes it as in training')
  parser.add_argument('--num_examples', type=int, default=4096, help='examples to measure')
  parser.add_argument('--no_hashes', action='store_true', help='do not read all files')
  args, changes = parser.parse_known_args(argv)
  if args.num_examples < 1:
    parser.error('--num_examples must be at least 1')
  if changes and not args.config:
    parser.error(f'unknown arguments: {" ".join(changes)}')
  data = [folder for given in args.data for folder in given.split(',') if folder]
  console.log_plainly(logging.ERROR)  # What the pipeline warns of is among the findings.
  findings, shown = diagnose(
      data, args.config, args.num_examples, not args.no_hashes, changes)
  for line in [*findings, *shown]:
    print(line)
  problems = sum(finding.level == 'problem' for finding in findings)
  warnings = sum(finding.level == 'warning' for finding in findings)
  print(f'{problems} problems, {warnings} warnings')
  return 1 if problems else 0


if __name__ == '__main__':
  sys.exit(main())
