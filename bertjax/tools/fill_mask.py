"""Guesses masked words: a quick look at what a model has learned.

  python -m bertjax.tools.fill_mask --checkpoint runs/quickstart 'Returns the [MASK] of the array.'
"""

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
  """Prints the likeliest tokens at each mask; 2 with one line on stderr if there is nothing to."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--checkpoint', required=True, help='workdir, or one step of it')
  parser.add_argument('--step', type=int, help='which step; the newest complete one if not given')
  parser.add_argument('--top', type=int, default=5, help='candidates for each mask')
  parser.add_argument('text', nargs='+', help='sentences with [MASK] in them')
  args = parser.parse_args(argv)
  if args.top < 1:
    parser.error('--top must be at least 1')

  from bertjax import api, errors  # they load JAX: not needed for --help

  try:
    model = api.load(args.checkpoint, args.step)
    for text in args.text:
      found = model.fill_mask(text, args.top)
      print(text)
      for number, guesses in enumerate(found, 1):
        words = '  '.join(f'{guess.token} {guess.probability:.3f}' for guess in guesses)
        print(f'  {number}: {words}')
  except (api.HeadError, api.MaskError, *errors.EXPECTED) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
