//! Where the API is and which key opens it.
//!
//! The only place of this program that reads its environment and the settings file. Each value comes from the first
//! place that has it: option, environment, `.aenv/env` of the working directory or of the nearest directory above it.
//! The address of sandboxes comes from no weaker place than that of the API, so that two nodes are never mixed.
//! Must not talk to the network. The file is parsed ([`environment_file`]), never run by a shell.

pub(crate) mod environment_file;

use crate::failure::{Exit, Failure};
use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const API_KEY: &str = "E2B_API_KEY";
const API_URL: &str = "E2B_API_URL";
const SANDBOX_URL: &str = "E2B_SANDBOX_URL";
const DATA_DIR: &str = "AENV_DOCTOR_DATA_DIR";
const DEFAULT_URL: &str = "http://127.0.0.1:8000";
/// Largest settings file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What every command needs to reach the node.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Opens the API; absent when no place has one (`doctor` works without).
    pub(crate) api_key: Option<ApiKey>,
    /// Base address of the API.
    pub(crate) api: BaseUrl,
    /// Base address under which sandboxes are reached by header.
    pub(crate) sandboxes: BaseUrl,
    /// Data directory of the node on this machine, for `doctor`; absent where none is named.
    pub(crate) data_dir: Option<PathBuf>,
}

/// The key of the API; not shown by `Debug`.
#[derive(Clone)]
pub(crate) struct ApiKey(http::HeaderValue);

impl ApiKey {
    fn parse(text: &str, source: &Source) -> Result<Self, Failure> {
        let mut value = http::HeaderValue::from_str(text).map_err(|_| {
            wrong(format!("the API key {source} holds characters that no key has"))
                .with_hint("keys look like e2b_ followed by hexadecimal digits")
        })?;
        value.set_sensitive(true);
        Ok(Self(value))
    }

    /// As a header's value.
    pub(crate) fn header(&self) -> http::HeaderValue {
        self.0.clone()
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ApiKey(…)")
    }
}

/// A checked base address: `http://host[:port][/path]`, without a slash at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BaseUrl(String);

impl BaseUrl {
    fn parse(text: &str, source: &Source) -> Result<Self, Failure> {
        let uri: http::Uri = text.parse().map_err(|error| {
            wrong(format!("{text:?} {source} is not an address: {error}")).with_hint(URL_HINT)
        })?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(wrong(format!("{text} {source}: https is not supported yet by aenv")).with_hint(
                    "use an http:// address, for one on another machine through `ssh -L 8000:127.0.0.1:8000`",
                ));
            }
            _ => {
                return Err(wrong(format!("{text:?} {source} is not an http:// address")).with_hint(URL_HINT));
            }
        }
        let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
        // Whatever is not `host` or `host:port` (a user name, a port out of range) is no address of a node.
        let port = uri.host().filter(|host| !host.is_empty()).and_then(|host| authority.strip_prefix(host));
        let port_is_usable = match port {
            None => false,
            Some("") => true,
            Some(port) => port.strip_prefix(':').is_some_and(|digits| digits.parse::<u16>().is_ok()),
        };
        if !port_is_usable || uri.query().is_some() {
            return Err(wrong(format!("{text:?} {source} is not a base address")).with_hint(URL_HINT));
        }
        let path = uri.path().trim_end_matches('/');
        Ok(Self(format!("http://{authority}{path}")))
    }

    /// As the address of one resource; `path_and_query` begins with a slash and is already encoded.
    ///
    /// # Errors
    /// When the result is no valid address (for instance longer than 64 KiB).
    pub(crate) fn join(&self, path_and_query: &str) -> Result<http::Uri, http::uri::InvalidUri> {
        format!("{}{path_and_query}", self.0).parse()
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

const URL_HINT: &str = "an address looks like http://127.0.0.1:8000";

/// Where a value was found, told in errors.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    Option(&'static str),
    Environment(&'static str),
    File(PathBuf),
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(name) => write!(formatter, "(option {name})"),
            Self::Environment(name) => write!(formatter, "(environment variable {name})"),
            Self::File(path) => write!(formatter, "(file {})", path.display()),
            Self::Default => formatter.write_str("(default)"),
        }
    }
}

impl Source {
    /// Orders the places: the stronger one wins.
    fn strength(&self) -> u8 {
        match self {
            Self::Option(_) => 3,
            Self::Environment(_) => 2,
            Self::File(_) => 1,
            Self::Default => 0,
        }
    }
}

/// What a settings file assigns.
type Values = BTreeMap<String, String>;

/// A value and where it was.
#[derive(Debug, Clone)]
struct Found {
    value: String,
    source: Source,
}

impl Found {
    fn new(text: &str, source: Source) -> Option<Self> {
        let value = text.trim();
        (!value.is_empty()).then(|| Self { value: value.to_owned(), source })
    }
}

/// Values given as options.
#[derive(Debug, Default)]
pub(crate) struct Overrides {
    /// `--api-key`
    pub(crate) api_key: Option<String>,
    /// `--api-url`
    pub(crate) api_url: Option<String>,
    /// `--sandbox-url`
    pub(crate) sandbox_url: Option<String>,
}

impl Settings {
    /// Reads the process's environment and, if something is missing there, the settings file.
    ///
    /// # Errors
    /// When a value cannot be used, or the file is needed and cannot be read, parsed or trusted.
    pub(crate) fn load(overrides: Overrides) -> Result<Self, Failure> {
        let environment =
            |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let user = rustix::process::geteuid().as_raw();
        let trusted = [Some(user), environment("SUDO_UID").and_then(|uid| uid.parse().ok()), Some(0)];
        Self::resolve(overrides, environment, || {
            let directory = match std::env::current_dir() {
                Ok(directory) => directory,
                // Nothing is above a directory that was deleted.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(wrong(format!("the working directory cannot be read: {error}"))),
            };
            find_file(&directory).map(|path| Ok((read_file(&path, &trusted)?, path))).transpose()
        })
    }

    /// Chooses among the places. Empty texts count as absent, as in E2B's clients.
    fn resolve(
        overrides: Overrides,
        environment: impl Fn(&str) -> Option<String>,
        load_file: impl FnOnce() -> Result<Option<(Values, PathBuf)>, Failure>,
    ) -> Result<Self, Failure> {
        let given = |option: Option<String>, option_name, name| {
            let option = option.map(|value| Found::new(&value, Source::Option(option_name)));
            let variable = || environment(name).map(|value| Found::new(&value, Source::Environment(name)));
            option.flatten().or_else(|| variable().flatten())
        };
        let api_key = given(overrides.api_key, "--api-key", API_KEY);
        let api = given(overrides.api_url, "--api-url", API_URL);
        let sandboxes = given(overrides.sandbox_url, "--sandbox-url", SANDBOX_URL);
        let file = if api_key.is_none() || api.is_none() { load_file()? } else { None };
        let filed = |name: &str| {
            let (values, path) = file.as_ref()?;
            Found::new(values.get(name)?, Source::File(path.clone()))
        };
        let api = api
            .or_else(|| filed(API_URL))
            .unwrap_or_else(|| Found { value: DEFAULT_URL.to_owned(), source: Source::Default });
        // An address of sandboxes from a weaker place than that of the API belongs to another node, and would be
        // sent this node's tokens.
        let sandboxes = sandboxes
            .or_else(|| filed(SANDBOX_URL))
            .filter(|found| found.source.strength() >= api.source.strength())
            .unwrap_or_else(|| api.clone());
        let api_key = api_key.or_else(|| filed(API_KEY));
        let data_dir = given(None, "", DATA_DIR).or_else(|| filed(DATA_DIR));
        Ok(Self {
            api_key: api_key.map(|found| ApiKey::parse(&found.value, &found.source)).transpose()?,
            api: BaseUrl::parse(&api.value, &api.source)?,
            sandboxes: BaseUrl::parse(&sandboxes.value, &sandboxes.source)?,
            data_dir: data_dir.map(|found| PathBuf::from(found.value)),
        })
    }

    /// The key, or how to get one.
    ///
    /// # Errors
    /// When no place has a key.
    pub(crate) fn require_key(&self) -> Result<&ApiKey, Failure> {
        self.api_key.as_ref().ok_or_else(|| {
            wrong("no API key: neither --api-key nor E2B_API_KEY is set, and there is no .aenv/env here or above")
                .with_hint("run `make up` in the project's directory, then `set -a; . .aenv/env; set +a`")
        })
    }
}

fn wrong(message: impl Into<String>) -> Failure {
    Failure::new(message).with_exit(Exit::USAGE)
}

/// The nearest `.aenv/env` at or above `directory`.
fn find_file(directory: &Path) -> Option<PathBuf> {
    directory.ancestors().map(|ancestor| ancestor.join(".aenv/env")).find(|path| path.is_file())
}

/// Reads the file, unless it belongs to another user: that user could send our key elsewhere.
fn read_file(path: &Path, trusted_owners: &[Option<u32>]) -> Result<Values, Failure> {
    let unreadable = |error: std::io::Error| {
        wrong(format!("the settings file {} cannot be read: {error}", path.display())).with_hint(
            "make it readable, or set E2B_API_KEY and E2B_API_URL and run aenv in another directory",
        )
    };
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !trusted_owners.contains(&Some(metadata.uid())) {
        return Err(wrong(format!("the settings file {} belongs to another user", path.display()))
            .with_hint("run aenv in another directory, or copy the file if you trust it"));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(wrong(format!("the settings file {} is too large to be one", path.display())));
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    environment_file::parse(&text).map_err(|error| {
        wrong(format!("the settings file {}, {error}", path.display()))
            .with_hint("`make up` writes it anew; lines look like E2B_API_URL=http://127.0.0.1:8000")
    })
}

#[cfg(test)]
mod tests;
