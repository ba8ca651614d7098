"""Evaluates a checkpoint on held-out documents, by itself.

  python -m bertjax.evaluate --checkpoint runs/quickstart --data runs/quickstart/shards

Masks and pairs are fixed, so two checkpoints are compared on the same questions. One JSON object is
printed; every example counts once, whatever the batch size.
"""

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
  """Prints the metrics; 2 with one line on stderr if the inputs do not fit."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--checkpoint', required=True, help='workdir, or one step of it')
  parser.add_argument('--step', type=int, help='which step; the newest complete one if not given')
  parser.add_argument('--data', required=True, help='folder of shards; several with commas')
  parser.add_argument('--split', default='heldout', choices=['heldout', 'train'])
  parser.add_argument('--seq_length', type=int, help='default: that of the first phase')
  parser.add_argument('--batch_size', type=int, default=64)
  parser.add_argument('--max_examples', type=int, default=4096,
                      help='a fixed choice of so many of the documents\' examples')
  args = parser.parse_args(argv)
  for name in ('batch_size', 'max_examples'):
    if getattr(args, name) < 1:
      parser.error(f'--{name} must be at least 1')

  from bertjax import api, errors

  try:
    found = evaluate(api.load(args.checkpoint, args.step), args)
    print(json.dumps(found, allow_nan=False))
  except errors.EXPECTED as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except ValueError:  # NaN is not JSON
    print(f'error: the model gives no finite loss: {found}', file=sys.stderr)
    return 1
  return 0


def evaluate(pretrained, args: argparse.Namespace) -> dict[str, int | float | str]:
  """The metrics of a loaded model on `args.data`.

  Raises:
    ConfigError: the shards were built with another tokenizer than the model's.
  """
  import jax

  from bertjax import pretraining, settings, sharding
  from bertjax.data import prepare

  corpora = prepare.open_corpora(tuple(args.data.split(',')))
  if corpora.tokenizer.hash() != pretrained.tokenizer.hash():
    raise settings.ConfigError(
        f'{args.data} was built with another tokenizer than the model; build it with the one in '
        'the checkpoint')
  if 'masked_lm' not in pretrained.params:
    raise settings.ConfigError(f'{args.checkpoint} has no masked-LM head: its kind is '
                               f'{pretrained.head["kind"]}')
  trained = settings.from_config(_trained_with(pretrained.metadata['config']))
  longest = pretrained.config.max_position_embeddings
  if args.seq_length and not 8 <= args.seq_length <= longest:
    raise settings.ConfigError(f'--seq_length {args.seq_length} is not between 8 and the '
                               f'{longest} positions of the model')
  splits = corpora.heldout if args.split == 'heldout' else corpora.train
  if not splits:
    raise settings.ConfigError(
        f'{args.data} has no held-out documents; --split train reads the others')
  mesh = sharding.make_mesh(sharding.MeshSettings())
  with jax.set_mesh(mesh):
    evaluator = pretraining.evaluator_on(
        splits, corpora.tokenizer, trained, pretrained.graphdef, mesh,
        seq_length=args.seq_length, batch_size=args.batch_size, max_examples=args.max_examples)
    params = jax.device_put(pretrained.params, sharding.shardings(pretrained.params, mesh))
    values = evaluator.run(params)
  return {'step': pretrained.metadata['step'], 'split': args.split,
          'num_examples': evaluator.num_examples} | values


def _trained_with(config: dict) -> dict:
  """The stored configuration; of an imported model what bertjax would train it with."""
  imported = {'data': {'path': '.'}, 'optimizer': {},
              'phases': ({'seq_length': 128, 'batch_size': 64, 'num_steps': 10_000},)}
  return config if 'phases' in config else imported | {'model': config['model']}


if __name__ == '__main__':
  sys.exit(main())
