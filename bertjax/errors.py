"""What a user can cause and mend: told in words, without a trace, and with an exit code."""

from bertjax.alarms import NonFiniteError
from bertjax.attention import AttentionError
from bertjax.checkpoint import CheckpointError
from bertjax.config import ConfigError
from bertjax.data.build import BuildError
from bertjax.data.corpus import CorpusError
from bertjax.data.encoding import TokenizerError
from bertjax.data.prepare import DataError
from bertjax.data.rows import RowsError
from bertjax.data.sampling import SamplingError
from bertjax.data.shards import ShardError
from bertjax.data.squad import SquadError
from bertjax.data.swag import SwagError
from bertjax.data.tagging import TaggingError
from bertjax.evals.entity_scores import EntityError
from bertjax.hosts import HostError
from bertjax.sharding import MeshError

EXPECTED = (
    AttentionError, BuildError, CheckpointError, ConfigError, CorpusError, DataError, EntityError,
    HostError, MeshError, NonFiniteError, RowsError, SamplingError, ShardError, SquadError,
    SwagError, TaggingError, TokenizerError)
