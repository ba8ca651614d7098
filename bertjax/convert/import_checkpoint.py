"""Imports a checkpoint of Hugging Face or of Google's TensorFlow code.

    python -m bertjax.convert.import_checkpoint --from hf:path/to/model_dir --output ckpt/
    python -m bertjax.convert.import_checkpoint --from tf:uncased_L-12_H-768_A-12/ --output ckpt/

hf: a directory with config.json, model.safetensors (or several with an index) or
pytorch_model.bin, and vocab.txt, spiece.model or tokenizer.json. tf: the prefix of a checkpoint
(bert_model.ckpt) or its folder, with bert_config.json and vocab.txt.

What is written is a checkpoint at step 0 that `init_from`, `export`, `inspect` and
`bertjax.load` take. A report says what became of every variable. Each parameter of the encoder is
filled exactly once, or nothing is written; heads that are not there are named as new, and training
initialises them. Exit code 2 with one message if the import stops.
"""

import argparse
import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

from bertjax import checkpoint, step_folder
from bertjax.convert import command, google_tf, hugging_face, names, parameters, vocabulary
from bertjax.convert.names import ConversionError
from bertjax.convert.parameters import Filled, Source, some
from bertjax.model import ACTIVATIONS

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
_HEADS = ('pooler', 'masked_lm', 'next_sentence')  # what training can initialise


class Imported(NamedTuple):
  """A foreign checkpoint in our terms.

  Attributes:
    params: a nested dict of arrays.
    metadata: what goes beside them in the checkpoint.
    tokenizer_files: the tokenizer's files by name.
    report: what became of every variable, in lines.
  """

  params: dict[str, Any]
  metadata: dict[str, Any]
  tokenizer_files: dict[str, bytes]
  report: str


def load(
    origin: str, *, head: str = 'auto', labels: list[str] | None = None, dtype: str = 'float32',
    hidden_act: str | None = None, vocab: epath.PathLike | None = None,
    lowercase: bool | None = None,
) -> Imported:
  """Reads a foreign checkpoint; writes nothing.

  Args:
    origin: 'hf:DIR' or 'tf:PREFIX_OR_DIR'.
    head: the kind of head to import, 'encoder' for none; 'auto' is what the checkpoint holds.
    labels: names of the classifier's outputs, where the checkpoint has none or others are wanted.
    dtype: of the parameters, 'float32' or 'bfloat16'.
    hidden_act: an activation of ours instead of what the config says.
    vocab: vocabulary file or tokenizer folder instead of what lies beside the weights.
    lowercase: whether text is lower-cased, where nothing stored says so.

  Raises:
    ConversionError: not a BERT, damaged, not every parameter of the encoder is filled, or a head
      that bertjax does not have.
    TokenizerError: a broken vocabulary, one of other rules than ours, or casing that is unknown or
      contradicts.
  """
  style, _, path = origin.partition(':')
  readers = {
      names.HUGGING_FACE: functools.partial(hugging_face.read, head=head, labels=labels),
      names.GOOGLE: google_tf.read,
  }
  if style not in readers or not path:
    raise ConversionError(f'--from {origin!r}: give hf:DIR or tf:PREFIX_OR_DIR')
  source = readers[style](path, hidden_act)
  found = vocabulary.find(source.folder, vocab, lowercase)
  kind = source.kind if head == 'auto' else head
  _check_vocabulary(source, found)
  filled = parameters.fill(source, kind, found.tokenizer.vocab_size, DTYPES[dtype])
  config = dataclasses.replace(source.config, vocab_size=found.tokenizer.vocab_size)
  groups = parameters.groups_of(filled.params)
  facts = source.facts if kind == source.kind else {}
  metadata = {
      'config': {'model': dataclasses.asdict(config)}, 'data_hash': '',
      'tokenizer_hash': found.tokenizer.hash(),
      'head': {**facts, 'kind': kind, 'labels': _labels(source, kind, labels, filled)},
      'missing': [group for group in _HEADS if group not in groups], 'imported_from': origin,
  }
  return Imported(filled.params, metadata, found.files,
                  _report(source, kind, filled, dtype, found))


def _check_vocabulary(source: Source, found: vocabulary.Found) -> None:
  """Refuses a vocabulary that is much smaller than the word table: it is another model's.

  A table that was padded up to a multiple of 128 at most (B121) is cut to the vocabulary.
  Tokens that were added without rows (`resize_token_embeddings` forgotten) are refused by name.
  """
  rows, entries = source.config.vocab_size, found.tokenizer.vocab_size
  if found.added and entries > rows:
    raise ConversionError(
        f'{source.path}: the word table has {rows} rows, and the vocabulary {entries} entries with '
        f'the tokens that were added to it ({some(found.added)}); to leave those out, name a '
        'vocab.txt without them with --vocab')
  if rows - entries >= 128:
    raise ConversionError(
        f'{source.path}: the word table has {rows} rows, and the vocabulary {entries} entries: it '
        'is that of another model; name the right one with --vocab')


def _labels(source: Source, kind: str, asked: list[str] | None, filled: Filled) -> list[str]:
  if kind not in hugging_face.LABELLED:
    if asked:
      raise ConversionError(f'--labels: a head of kind {kind} has no labels')
    return []
  number = filled.params['classifier']['bias'].size
  if kind == 'regression' and number != 1:
    raise ConversionError(f'{source.path}: a regression with {number} outputs; bertjax knows those '
                          'of one only: --head encoder imports the model without its head')
  labels = asked or source.labels or [f'LABEL_{index}' for index in range(number)]
  if len(labels) != number or len(set(labels)) != number:
    raise ConversionError(f'{source.path}: the classifier has {number} outputs; give as many '
                          f'different --labels (now: {", ".join(labels)})')
  return labels


def _report(source: Source, kind: str, filled: Filled, dtype: str,
            found: vocabulary.Found) -> str:
  """What became of every variable, what is new, and the tokenizer."""
  config = source.config
  stored = sorted({array.dtype.name for array in source.tensors.values()})
  lines = [
      f'{source.path}: {config.num_hidden_layers} layers of {config.hidden_size}, '
      f'{config.hidden_act}, head: {kind}',
      f'  used     {len(filled.used)} variables ({", ".join(stored)}) as '
      f'{sum(source.tensors[name].size for name in filled.used):,} parameters of {dtype}',
  ]
  lines += [f'  skipped  {len(skipped)} {reason}: {some(skipped, 3)}'
            for reason, skipped in source.skipped.items()]
  if filled.unused:
    lines.append(f'  unused   {len(filled.unused)}: {some(filled.unused, 100)}')
  if filled.missing:
    lines.append(f'  new      {", ".join(filled.missing)}: not in the checkpoint; training '
                 'initialises what it needs of them')
  absent = [group for group in _HEADS if group not in filled.missing and not any(
      name in source.tensors for variable in names.of([group])
      for name in variable.names(source.style, 0))]
  if absent:
    lines.append(f'  absent   {", ".join(absent)}: not in the checkpoint, and not asked for')
  lines.append(f'  vocabulary {vocabulary.facts(found)}')
  if found.added:
    lines.append(f'  added    {vocabulary.added_facts(found)}')
  surplus = config.vocab_size - found.tokenizer.vocab_size
  if surplus:
    lines.append(f'  dropped  the last {surplus} of {config.vocab_size} rows of the word table: '
                 'the vocabulary has no entries for them')
  return '\n'.join(lines + [f'  note     {note}' for note in source.notes])


def save(imported: Imported, output: epath.PathLike) -> epath.Path:
  """Writes an import as `OUTPUT/checkpoints/0/`, whole or not at all.

  Raises:
    ConversionError: there are checkpoints in `output` already.
    CheckpointError: it could not be written.
  """
  root = step_folder.absolute(output) / step_folder.FOLDER
  if step_folder.steps(root):
    raise ConversionError(f'{output}: holds checkpoints already; give another --output')
  return checkpoint.save_params(
      output, 0, imported.params, imported.metadata, imported.tokenizer_files)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.convert.import_checkpoint', description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--from', dest='origin', required=True, metavar='hf:DIR|tf:PREFIX',
                      help='what to import')
  parser.add_argument('--output', required=True, help='folder to write the checkpoint into')
  parser.add_argument('--head', choices=('auto', *names.GROUPS), default='auto',
                      help='which head to import; encoder: none (default: what is there)')
  parser.add_argument('--labels', type=lambda text: text.split(','),
                      help="names of a classifier's outputs, with commas")
  parser.add_argument('--dtype', choices=tuple(DTYPES), default='float32',
                      help='type of the parameters (default float32)')
  parser.add_argument('--hidden_act', choices=tuple(ACTIVATIONS),
                      help="activation instead of the stored one (Google's gelu is gelu_tanh here)")
  parser.add_argument('--vocab', help='vocab.txt, spiece.model, tokenizer.json or a folder with one'
                      ' (default: beside the weights); the first two themselves are taken without '
                      'added tokens, and for BERT\'s or ALBERT\'s whatever is said beside them')
  case = parser.add_mutually_exclusive_group()
  case.add_argument('--lowercase', action='store_true', default=None,
                    help='text is lower-cased, where nothing beside the weights says so')
  case.add_argument('--no_lowercase', dest='lowercase', action='store_false',
                    help='text is not lower-cased')
  return parser


def main(arguments: list[str] | None = None) -> int:
  """The command line; returns the exit code."""
  args = _parser().parse_args(arguments)

  def convert() -> str:
    imported = load(args.origin, head=args.head, labels=args.labels, dtype=args.dtype,
                    hidden_act=args.hidden_act, vocab=args.vocab, lowercase=args.lowercase)
    return f'{imported.report}\nwritten to {save(imported, args.output)}'

  return command.run('import_checkpoint', convert)


if __name__ == '__main__':
  sys.exit(main())
