"""Tokenizers: load, train, and the command line.

    python -m bertjax.data.tokenizer train --input 'text/*.txt' --vocab_size 30522 --output tok/
    python -m bertjax.data.tokenizer encode --tokenizer tok/ < lines.txt
"""

import argparse
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import logging
from etils import epath

from bertjax.data import console
from bertjax.data.encoding import Encoding, Tokenizer, TokenizerError
from bertjax.data.text_rules import AlbertRules, TextRules

__all__ = ['Encoding', 'Tokenizer', 'TokenizerError', 'load', 'main', 'train']

CONFIG = 'tokenizer_config.json'
FAST = 'tokenizer.json'  # of the package `tokenizers`: vocabulary and rules in one
_INTERRUPTED = 130  # the exit status that shells give Ctrl-C
VOCABULARIES = ('vocab.txt', 'spiece.model')
# Our names of the switches -> those in tokenizer_config.json, which are Transformers'.
_CONFIG_NAMES = {
  'lowercase': 'do_lower_case',
  'strip_accents': 'strip_accents',
  'split_cjk': 'tokenize_chinese_chars',
  'clean_text': 'clean_text',
  'max_chars_per_word': 'max_input_chars_per_word',
}
# Classes of Transformers that cut text as BERT or ALBERT does.
_CLASSES = re.compile(
  '((Distil|Mobile|Squeeze|Conv)?Bert|Electra|LayoutLM|Albert)Tokenizer(Fast|Legacy)?'
)
# Those that may cut it in any way, which tokenizer.json says.
_GENERIC_CLASSES = ('PreTrainedTokenizerFast', 'TokenizersBackend')
# What tokenizer.json has where text is cut as BERT does.
_FAST_TYPES = {
  'model': 'WordPiece', 'normalizer': 'BertNormalizer', 'pre_tokenizer': 'BertPreTokenizer'
}


def load(path: epath.PathLike, **switches: bool | int | None) -> Tokenizer:
  """Loads a tokenizer.

  Args:
    path: a folder (saved by `save`, or of a Transformers model) with vocab.txt or spiece.model and
      tokenizer_config.json; or such a vocabulary file, whose folder's config counts if it has one,
      save where it names rules that are not ours: who names the file wants ours.
    **switches: lowercase, strip_accents, split_cjk, clean_text, max_chars_per_word. Only needed
      where nothing is stored; None means not given. What is neither stored nor given is Google's
      default: lower case; accents stripped where lower-casing (BERT) or always (ALBERT).

  Raises:
    TokenizerError: nothing to load, a broken vocabulary, a switch that contradicts the stored one,
      lower-casing by default with a vocabulary that has capitals, or a folder that `check_rules`
      refuses.
  """
  path = epath.Path(path)
  check_rules(path)
  vocabulary = _find_vocabulary(path)
  stored = _read_config(vocabulary.parent / CONFIG)
  given = {name: value for name, value in switches.items() if value is not None}
  unknown = given.keys() - _CONFIG_NAMES.keys()
  if unknown:
    raise TypeError(f'no switch {", ".join(unknown)}; there are {", ".join(_CONFIG_NAMES)}')
  for name, value in given.items():
    if name in stored and stored[name] != value:
      raise TokenizerError(
        f'{vocabulary.parent / CONFIG} says {name}={stored[name]}, but {name}={value} is asked for;'
        ' leave the switch out, or give a vocabulary without this file'
      )
  return _make(vocabulary.read_bytes(), str(vocabulary), stored | given)


def _find_vocabulary(path: epath.Path) -> epath.Path:
  if not path.exists():
    raise TokenizerError(f'{path}: no such file or folder')
  if not path.is_dir():
    return path
  found = [path / name for name in VOCABULARIES if (path / name).exists()]
  if len(found) != 1:
    has = 'both {} and {}' if found else 'neither {} nor {}'
    raise TokenizerError(
      f'{path}: has {has.format(*VOCABULARIES)}; name the one to use by its full path'
    )
  return found[0]


def check_rules(path: epath.Path) -> None:
  """Refuses a tokenizer of Transformers that cuts text in another way than BERT and ALBERT do.

  Args:
    path: a folder or a tokenizer.json. Any other file is somebody's word that our rules are right.

  Raises:
    TokenizerError: such a tokenizer, or a file that holds no JSON object.
  """
  if path.is_dir():
    found = next(_other_rules(path), None)
  else:
    found = next(_other_fast_rules(path), None) if path.name == FAST else None
  if found:
    raise TokenizerError(
      f"{path}: its tokenizer is not BERT's or ALBERT's, and bertjax has no other: {found}; to cut"
      f' text as theirs do all the same, name a {" or ".join(VOCABULARIES)} by its full path'
      ' (--vocab on import)'
    )


def _other_rules(folder: epath.Path) -> Iterator[str]:
  """What in a folder says so, in words."""
  config = _read_json(folder / CONFIG)
  if config.get('do_basic_tokenize') is False:
    yield f'{CONFIG} says do_basic_tokenize=False'
  for key, ours in (('word_tokenizer_type', 'basic'), ('subword_tokenizer_type', 'wordpiece')):
    if config.get(key) not in (None, ours):
      yield f'{CONFIG} says {key}={config[key]!r}'
  name = config.get('tokenizer_class')
  place = 'config.json' if name is None else CONFIG
  name = _read_json(folder / place).get('tokenizer_class')
  if name in _GENERIC_CLASSES:
    if not (folder / FAST).exists():
      yield f'{place} says tokenizer_class={name!r}, and there is no {FAST} to say more'
  elif name is not None and not _CLASSES.fullmatch(str(name)):
    yield f'{place} says tokenizer_class={name!r}'
  if not (folder / VOCABULARIES[1]).exists():
    yield from _other_fast_rules(folder / FAST)


def _other_fast_rules(file: epath.Path) -> Iterator[str]:
  """What in a tokenizer.json, if it is there, says so."""
  values = _read_json(file)
  for key, ours in _FAST_TYPES.items() if values else ():
    part = values.get(key)
    # The first versions of the package did not write the type of the model.
    absent = ours if key == 'model' else None
    kind = part.get('type', absent) if isinstance(part, dict) else part
    if kind != ours:
      yield f'{FAST} has {key} {kind!r} instead of {ours}'


def _read_json(file: epath.Path) -> dict[str, Any]:
  """The object in a file; an empty one where there is no file."""
  if not file.exists():
    return {}
  try:
    values = json.loads(file.read_bytes().decode('utf-8-sig'))  # Windows may put a mark before it
  except ValueError as error:
    raise TokenizerError(f'{file}: not JSON: {error}') from error
  if not isinstance(values, dict):
    raise TokenizerError(f'{file}: holds {type(values).__name__} instead of a JSON object')
  return values


def _read_config(file: epath.Path) -> dict[str, Any]:
  """The stored switches under our names; those that are null or absent are left out."""
  config = _read_json(file)
  stored = {
    name: config[key] for name, key in _CONFIG_NAMES.items() if config.get(key) is not None
  }
  if config.get('keep_accents') is not None:
    stored.setdefault('strip_accents', not config['keep_accents'])
  return stored


def _make(content: bytes, name: str, switches: dict[str, Any]) -> Tokenizer:
  if name.endswith('.model'):
    # Imported here because only one of the two is needed, and sentencepiece takes its time.
    from bertjax.data.sentencepiece_model import SentencePieceTokenizer

    tokenizer: Tokenizer = SentencePieceTokenizer(content, _albert_rules(switches), name)
  else:
    from bertjax.data.wordpiece import WordPieceTokenizer

    tokenizer = WordPieceTokenizer(content, _text_rules(switches), name)
  if 'lowercase' not in switches:
    _check_case(tokenizer, name)
    logging.info('%s: no stored switches; taken: %s', name, tokenizer.switches)
  return tokenizer


def _text_rules(switches: dict[str, Any]) -> TextRules:
  """Google's BERT strips accents exactly where it lower-cases."""
  lowercase = switches.get('lowercase', True)
  return TextRules(**{'strip_accents': lowercase, **switches})


def _albert_rules(switches: dict[str, Any]) -> AlbertRules:
  """Google's ALBERT strips accents also from cased text."""
  return AlbertRules(switches.get('lowercase', True), switches.get('strip_accents', True))


def _check_case(tokenizer: Tokenizer, name: str) -> None:
  """A cased vocabulary with lower-cased text gives mostly unknown tokens and no error (B023)."""
  pieces = map(tokenizer.token, tokenizer.ordinary_ids)
  capital = next(
    (
      piece
      for piece in pieces
      # Entries such as <S> are no words: text never gives them, in whatever case.
      if piece != piece.lower() and piece.removeprefix('##').removeprefix('▁').isalnum()
    ),
    None,
  )
  if capital is not None:
    raise TokenizerError(
      f'{name}: has capitals ({capital!r}), but nothing says whether text is to be lower-cased;'
      f' pass lowercase=False (--no_lowercase) or lowercase=True (--lowercase), or put a {CONFIG}'
      ' beside it'
    )


def train(
  texts: Iterable[str],
  type: str = 'wordpiece',
  vocab_size: int = 30522,
  **switches: bool | int | None,
) -> Tokenizer:
  """Trains a tokenizer; the same texts give the same one.

  Args:
    texts: lines or sentences of plain text.
    type: 'wordpiece' or 'sentencepiece' (unigram).
    vocab_size: entries, special tokens included; fewer where the text has no more.
    **switches: as in `load`.

  Raises:
    TokenizerError: no text, an unknown type, or a vocab_size the text cannot fill.
  """
  given = {name: value for name, value in switches.items() if value is not None}
  if type == 'wordpiece':
    from bertjax.data.wordpiece import train_wordpiece

    return train_wordpiece(texts, vocab_size, _text_rules(given))
  if type == 'sentencepiece':
    from bertjax.data.sentencepiece_model import train_sentencepiece

    return train_sentencepiece(texts, vocab_size, _albert_rules(given))
  raise TokenizerError(f'type {type!r} is neither wordpiece nor sentencepiece')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog='python -m bertjax.data.tokenizer', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(dest='command', required=True)
  switches = argparse.ArgumentParser(add_help=False)
  case = switches.add_mutually_exclusive_group()
  case.add_argument('--lowercase', action='store_true', default=None,
                    help="lower-case the text (the default, as in Google's uncased models)")
  case.add_argument('--no_lowercase', dest='lowercase', action='store_false')
  accents = switches.add_mutually_exclusive_group()
  accents.add_argument('--strip_accents', action='store_true', default=None,
                       help='drop accents (the default for WordPiece where it lower-cases, and for'
                       ' SentencePiece)')
  accents.add_argument('--keep_accents', dest='strip_accents', action='store_false')
  switches.add_argument('--max_chars_per_word', type=int,
                        help='WordPiece: longer words are unknown (default 200)')

  trainer = commands.add_parser('train', parents=[switches], help='learn a vocabulary from text')
  trainer.add_argument('--input', nargs='+', required=True,
                       help='files, patterns, folders, builtin:docs or tfds:NAME')
  trainer.add_argument('--type', choices=('wordpiece', 'sentencepiece'), default='wordpiece')
  trainer.add_argument('--vocab_size', type=int, default=30522)
  trainer.add_argument('--output', required=True, help='folder to write')
  trainer.add_argument('--overwrite', action='store_true',
                       help='replace the tokenizer that the folder holds')
  trainer.add_argument('--format', default='auto', help='auto, sentences, prose or jsonl')
  trainer.add_argument('--language', default='en', help='for splitting prose into sentences')
  trainer.add_argument('--text_field', default='text', help='key of the text in JSON lines')
  trainer.add_argument('--encoding_errors', default='strict', help='strict, replace or ignore')

  encoder = commands.add_parser('encode', parents=[switches],
                                help='print a line of JSON for each line of standard input')
  encoder.add_argument('--tokenizer', required=True,
                       help='saved folder, vocab.txt or spiece.model')
  encoder.add_argument('--special_text', '--mask_token', action='store_true',
                       help='take a literal [MASK], [SEP], ... for the special token')
  return parser


def _switches(args: argparse.Namespace) -> dict[str, bool | int | None]:
  return {
    'lowercase': args.lowercase,
    'strip_accents': args.strip_accents,
    'max_chars_per_word': args.max_chars_per_word,
  }


def _train_command(args: argparse.Namespace) -> None:
  from bertjax.data import corpus

  output = epath.Path(args.output)
  _check_output(output, args.overwrite)
  texts = corpus.iter_text(
    args.input, args.format, args.language, args.text_field, args.encoding_errors
  )
  tokenizer = _interruptible(
    lambda: train(texts, args.type, args.vocab_size, **_switches(args))
  )
  tokenizer.save(output)
  other = VOCABULARIES[args.type == 'wordpiece']
  (output / other).unlink(missing_ok=True)
  print(f'{args.output}: {args.type}, {tokenizer.vocab_size} entries, {tokenizer.switches},'
        f' hash {tokenizer.hash()[:16]}')


def _check_output(output: epath.Path, overwrite: bool) -> None:
  """Before the work, not after it: can the tokenizer be written there?"""
  there = next((path for path in (output, *output.parents) if path.exists()), output)
  if there.exists() and not there.is_dir():
    raise TokenizerError(f'--output {output}: {there} is a file; name a folder')
  found = [name for name in (*VOCABULARIES, CONFIG) if (output / name).exists()]
  if found and not overwrite:
    raise TokenizerError(
      f'--output {output} holds a tokenizer already ({", ".join(found)}); --overwrite replaces it'
    )


def _interruptible(work: Callable[[], Tokenizer]) -> Tokenizer:
  """Does the work in another thread.

  The main thread, which alone hears Ctrl-C, would hear it only when a trainer in C++ is done.
  """
  made: list[Tokenizer] = []
  failed: list[Exception] = []

  def run() -> None:
    try:
      made.append(work())
    except Exception as error:
      failed.append(error)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join()
  if failed:
    raise failed[0]
  return made[0]


def _encode_command(args: argparse.Namespace) -> None:
  tokenizer = load(args.tokenizer, **_switches(args))
  # Bytes, so that neither the locale nor str.splitlines has a say in what a line is.
  for number, line in enumerate(sys.stdin.buffer, 1):
    try:
      text = line.removesuffix(b'\n').removesuffix(b'\r').decode()
    except UnicodeDecodeError as error:
      raise TokenizerError(
        f'standard input, line {number}: not UTF-8 at byte {error.start} of the line'
      ) from error
    encoding = tokenizer.encode(text, special_text=args.special_text)
    row = json.dumps(encoding._asdict(), ensure_ascii=False) + '\n'
    sys.stdout.buffer.write(row.encode('utf-8', 'backslashreplace'))
  sys.stdout.buffer.flush()


def main(arguments: list[str] | None = None) -> int:
  """The command line: 0 when all went well, 2 for bad usage or input, 130 when interrupted."""
  args = _parser().parse_args(arguments)
  console.log_plainly()
  try:
    {'train': _train_command, 'encode': _encode_command}[args.command](args)
  except BrokenPipeError:
    # The reader went away (`| head`); what is still buffered has no one to go to.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return _INTERRUPTED
  return 0


if __name__ == '__main__':
  status = main()
  if status == _INTERRUPTED:
    os._exit(status)  # A trainer may still be at work in its thread.
  sys.exit(status)
