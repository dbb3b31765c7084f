//! Bodies of the public HTTP API.
