//! What the daemon knows: settings of the last `/init`, processes, and whether the machine is its own.
//!
//! Owns the settings. Performs no I/O but reading accounts.

use crate::accounts::{AccountError, Accounts, User};
use crate::freezer::Freezer;
use crate::paths::{self, PathError};
use crate::process::table::Processes;
use crate::sync::Flushes;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use subtle::ConstantTimeEq as _;

/// What `/init` sets.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    /// Environment of processes, on top of what the daemon sets.
    pub(crate) environment: BTreeMap<String, String>,
    /// Token that requests must carry; none leaves the daemon open.
    pub(crate) token: Option<Token>,
    /// User of requests that name none; none means `root`.
    pub(crate) default_user: Option<String>,
    /// Directory of processes and paths that name none; none means the user's home.
    pub(crate) default_directory: Option<PathBuf>,
    /// Sandbox and template id.
    pub(crate) identity: Option<(String, String)>,
    /// Host's time of the last `/init`.
    pub(crate) stamp: Option<jiff::Timestamp>,
}

/// A secret that is compared in constant time and never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(String);

impl Token {
    /// Wraps a secret.
    #[must_use]
    pub(crate) fn new(secret: String) -> Self {
        Self(secret)
    }

    /// Whether `given` is the secret.
    #[must_use]
    pub(crate) fn matches(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }

    /// The secret, to sign with.
    #[must_use]
    pub(crate) fn secret(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Whether the daemon may change the machine it runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Machine {
    /// It is PID 1 of a guest: clock, hostname and files below `/etc` are its own.
    Guest,
    /// It is an ordinary process of a machine that belongs to someone else: `/init` changes settings only.
    Foreign,
}

/// The daemon. Clones share one.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    settings: Arc<RwLock<Settings>>,
    /// Processes started by clients.
    pub(crate) processes: Processes,
    /// Whether the machine is the daemon's own.
    pub(crate) machine: Machine,
    /// What brings written data to the disk.
    pub(crate) flushes: Flushes,
    /// What holds programs still while the guest is captured.
    pub(crate) freezer: Freezer,
    /// `PATH` of processes.
    search_path: Arc<str>,
}

impl Daemon {
    /// A daemon that was not greeted yet.
    #[must_use]
    pub(crate) fn new(processes: Processes, machine: Machine, search_path: &str) -> Self {
        Self {
            settings: Arc::default(),
            processes,
            machine,
            flushes: Flushes::default(),
            freezer: Freezer::default(),
            search_path: search_path.into(),
        }
    }

    /// The settings, to read. Not to be held across an await.
    pub(crate) fn settings(&self) -> RwLockReadGuard<'_, Settings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The settings, to change. Not to be held across an await.
    pub(crate) fn settings_mut(&self) -> RwLockWriteGuard<'_, Settings> {
        self.settings.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The accounts of this moment.
    ///
    /// # Errors
    /// When their files cannot be read.
    pub(crate) fn accounts(&self) -> Result<Accounts, AccountError> {
        Accounts::read(Path::new("/etc"))
    }

    /// The named user, or the default one for an empty or absent name.
    ///
    /// # Errors
    /// When there is no such user.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, AccountError> {
        let accounts = self.accounts()?;
        match name.filter(|name| !name.is_empty()) {
            Some(name) => accounts.user(name),
            None => accounts.user(self.settings().default_user.as_deref().unwrap_or("root")),
        }
    }

    /// The absolute path that a request means.
    ///
    /// # Errors
    /// When it is not a path.
    pub(crate) fn path(&self, given: &OsStr, user: &User) -> Result<PathBuf, PathError> {
        paths::resolve(given, user, self.settings().default_directory.as_deref())
    }

    /// Environment that every process gets, without what a user or a request adds.
    #[must_use]
    pub(crate) fn global_environment(&self) -> BTreeMap<String, String> {
        let settings = self.settings();
        let mut environment = BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())]);
        if let Some((sandbox, template)) = &settings.identity {
            environment.insert("E2B_SANDBOX_ID".into(), sandbox.clone());
            environment.insert("E2B_TEMPLATE_ID".into(), template.clone());
        }
        environment.extend(settings.environment.iter().map(|(key, value)| (key.clone(), value.clone())));
        environment
    }

    /// The whole environment of a process: the daemon's search path, the user, the global one, then the request's.
    pub(crate) fn environment(
        &self,
        user: &User,
        request: impl IntoIterator<Item = (String, String)>,
    ) -> Vec<(OsString, OsString)> {
        let mut environment: BTreeMap<OsString, OsString> = BTreeMap::from([
            ("PATH".into(), (&*self.search_path).into()),
            ("HOME".into(), user.home.clone().into()),
            ("USER".into(), user.name.clone().into()),
            ("LOGNAME".into(), user.name.clone().into()),
        ]);
        let added = self.global_environment().into_iter().chain(request);
        environment.extend(added.map(|(key, value)| (key.into(), value.into())));
        environment.into_iter().collect()
    }
}
