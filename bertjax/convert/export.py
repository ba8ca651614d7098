"""Exports a checkpoint to a Hugging Face directory or to a checkpoint of Google's TensorFlow code.

    python -m bertjax.convert.export --checkpoint runs/rte --to hf --output hf_dir/
    python -m bertjax.convert.export --checkpoint runs/base --to tf --accept_gelu_mismatch \\
        --output tf_dir/

hf: config.json, model.safetensors and the tokenizer's files; Transformers loads the directory as
the class of its head (BertForPreTraining, BertForSequenceClassification, ...). tf:
bert_config.json, bert_model.ckpt and the tokenizer's files. Of a fine-tuning run its best model is
taken unless --step is given.
Exit code 2 with one message if the export stops; then nothing is written.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator

from etils import epath

from bertjax import best, checkpoint, step_folder
from bertjax.convert import command, google_tf, hugging_face, names
from bertjax.convert.import_checkpoint import DTYPES
from bertjax.convert.names import ConversionError
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.model import BertConfig


def export(
    path: epath.PathLike, to: str, output: epath.PathLike, *, step: int | None = None,
    dtype: str = 'float32', accept_gelu_mismatch: bool = False, encoder_only: bool = False,
) -> str:
  """Exports a checkpoint.

  Args:
    path: a workdir, its checkpoints folder, or one step's folder.
    to: 'hf' or 'tf'.
    output: a folder that does not exist or is empty.
    step: which step; None is the best of a fine-tuning run, else the newest complete one.
    dtype: 'float32' or 'bfloat16' (hf only).
    accept_gelu_mismatch: see `google_tf.write`.
    encoder_only: leave out the head.

  Returns:
    A report in lines.

  Raises:
    CheckpointError: no such checkpoint.
    ConversionError: the other side has no such model, or there is something in `output`.
  """
  found = best.find(path) if step is None else None
  folder = step_folder.find(found or path, step)
  metadata = step_folder.read_metadata(folder)
  config = BertConfig(**metadata['config']['model'])
  head = metadata.get('head') or {'kind': 'pretraining', 'labels': []}
  params = checkpoint.restore_params(folder)
  if encoder_only:
    params, head = {'bert': params['bert']}, {'kind': 'encoder', 'labels': []}
  tokenizer_folder = folder / step_folder.OURS / 'tokenizer'
  with _whole(output) as scratch:
    if to == names.HUGGING_FACE:
      pad_id = tokenizer_lib.load(tokenizer_folder).pad_id
      notes = hugging_face.write(scratch, params, config, head, pad_id, DTYPES[dtype])
    elif dtype == 'float32':
      notes = google_tf.write(scratch, params, config, head, accept_gelu_mismatch)
    else:
      raise ConversionError(f'--dtype {dtype}: Google\'s code reads float32 only')
    _copy_tokenizer(tokenizer_folder, scratch, config)
  chosen = f' (the best of {path})' if found else ''
  return '\n'.join([f'{folder}{chosen} exported to {output}', *(f'  {note}' for note in notes)])


@contextlib.contextmanager
def _whole(output: epath.PathLike) -> Iterator[epath.Path]:
  """A folder to write into, which gets its name when all went well and goes otherwise."""
  output = step_folder.absolute(output)
  if output.exists() and not (output.is_dir() and not list(output.iterdir())):
    raise ConversionError(f'{output}: exists already; give another --output')
  scratch = output.parent / f'{output.name}.bertjax-export-tmp'
  if scratch.exists():
    scratch.rmtree()  # of an export that was killed
  scratch.mkdir(parents=True)
  try:
    yield scratch
    if output.exists():
      output.rmtree()  # empty, as seen above
    scratch.rename(output)
  except BaseException:
    scratch.rmtree(missing_ok=True)
    raise


def _copy_tokenizer(source: epath.Path, target: epath.Path, config: BertConfig):
  """The vocabulary byte for byte; Transformers also wants to know the longest row."""
  for file in source.iterdir():
    if file.name != tokenizer_lib.CONFIG:
      (target / file.name).write_bytes(file.read_bytes())
      continue
    values = json.loads(file.read_text(encoding='utf-8'))
    values['model_max_length'] = config.max_position_embeddings
    (target / file.name).write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.convert.export', description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--checkpoint', required=True,
                      help='a workdir, its checkpoints folder, or one step in it')
  parser.add_argument('--to', required=True, choices=(names.HUGGING_FACE, names.GOOGLE))
  parser.add_argument('--output', required=True, help='folder to write; must be new or empty')
  parser.add_argument('--step', type=int,
                      help='which step (default: the best, else the newest complete one)')
  parser.add_argument('--dtype', choices=tuple(DTYPES), default='float32',
                      help='type of the weights (default float32; bfloat16 with --to hf only)')
  parser.add_argument('--encoder_only', action='store_true', help='leave out the head')
  parser.add_argument('--accept_gelu_mismatch', action='store_true',
                      help="write a model of the exact gelu for Google's code, which computes the "
                      'tanh form')
  return parser


def main(arguments: list[str] | None = None) -> int:
  """The command line; returns the exit code."""
  args = _parser().parse_args(arguments)
  return command.run('export', lambda: export(
      args.checkpoint, args.to, args.output, step=args.step, dtype=args.dtype,
      accept_gelu_mismatch=args.accept_gelu_mismatch, encoder_only=args.encoder_only))


if __name__ == '__main__':
  sys.exit(main())
