"""Vectors of texts from a frozen encoder, as an npz file.

    python -m bertjax.tools.features --checkpoint ckpt/ --input sentences.txt \\
        --output features.npz --layers=-1,-2,-3,-4
    python -m bertjax.tools.features ... --pooling mean        # one vector a text

Input: one text a line; a TAB separates the two parts of a pair. The file has an array `layer_-1`
for each layer asked for, float32. With pooling its rows are the lines. Without, they are the tokens
of all lines back to back ([CLS] and [SEP] included): line i, counted from 0, has the rows
row_splits[i] to row_splits[i + 1], and `input_ids` has their ids.
"""

import argparse
import sys


def _layers(text: str) -> list[int]:
  try:
    return [int(part) for part in text.split(',')]
  except ValueError:
    raise argparse.ArgumentTypeError(
        f'{text!r} is no list of layers; write e.g. --layers=-1,-2') from None


def _positive(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f'{text!r} is no number from 1')
  return int(text)


def main(argv: list[str] | None = None) -> int:
  """The command line; returns the exit code: 2 with one line on stderr for bad input."""
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.tools.features', description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--checkpoint', required=True, help='workdir, or one step of it')
  parser.add_argument('--step', type=int, help='which step; if not given, the best of a '
                      'fine-tuning, else the newest complete one')
  parser.add_argument('--input', required=True, help='text file, one text a line')
  parser.add_argument('--output', required=True, help='the .npz file to write')
  parser.add_argument('--layers', type=_layers, default=[-1], metavar='LIST',
                      help='0 is the output of the embeddings, negative counts from the last layer;'
                      ' written --layers=-1,-2 (default -1)')
  parser.add_argument('--pooling', choices=('none', 'cls', 'mean'), default='none',
                      help='a vector for every token (default), that of [CLS], or the mean')
  parser.add_argument('--batch_size', type=_positive, default=32)
  parser.add_argument('--truncate', action='store_true',
                      help='cut texts that are longer than the model takes, instead of refusing')
  flags = parser.parse_args(argv)

  from bertjax import api, checkpoint, features  # they load JAX: not needed for --help
  from bertjax.data import console
  from bertjax.data.encoding import TokenizerError

  console.log_plainly()
  try:
    texts = features.read(flags.input)
    model = api.load(flags.checkpoint, flags.step)
    rows = features.encode(texts, model.tokenizer, model.config.max_position_embeddings,
                           flags.truncate, flags.input)
    features.write(model, rows, flags.output, flags.layers, flags.pooling, flags.batch_size)
  except (features.FeatureError, checkpoint.CheckpointError, TokenizerError, OSError) as error:
    print(f'features: {error}', file=sys.stderr)
    return 2
  print(f'{flags.output}: {len(rows)} texts, {sum(len(row["input_ids"]) for row in rows)} tokens')
  return 0


if __name__ == '__main__':
  sys.exit(main())
