//! The wire side of the file tree.

use super::change::{is_missing, make_directories, remove};
use super::entry::{describe, list};
use crate::accounts::{Accounts, User};
use crate::daemon::Daemon;
use crate::rpc::{caller, internal};
use aenv_protocol::envd::filesystem as wire;
use connectrpc::{
    ConnectError, Encodable, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// The filesystem service of one daemon.
pub(crate) struct FilesystemRpc(pub(crate) Daemon);

/// Who asks, and who is who.
struct Caller {
    user: User,
    accounts: Accounts,
}

impl FilesystemRpc {
    fn caller(&self, ctx: &RequestContext) -> Result<Caller, ConnectError> {
        let user = caller(&self.0, ctx)?;
        Ok(Caller { user, accounts: self.0.accounts().map_err(|error| internal(&error))? })
    }

    fn path(&self, given: &str, caller: &Caller) -> Result<PathBuf, ConnectError> {
        self.0
            .path(OsStr::new(given), &caller.user)
            .map_err(|e| ConnectError::invalid_argument(e.to_string()))
    }
}

/// Runs what blocks beside the event loop. It goes on to its end when the request is given up meanwhile.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| internal(&error))?
}

fn failed(doing: &str, path: &Path, error: &io::Error) -> ConnectError {
    let message = format!("{doing} '{}': {error}", path.display());
    if is_missing(error) { ConnectError::not_found(message) } else { ConnectError::internal(message) }
}

fn make_directory(path: &Path, caller: &Caller) -> Result<wire::EntryInfo, ConnectError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            return Err(ConnectError::already_exists(format!(
                "directory already exists: {}",
                path.display()
            )));
        }
        Ok(_) => return Err(in_the_way(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Err(in_the_way(path)),
        Err(error) => return Err(failed("cannot look at", path, &error)),
    }
    make_directories(path, &caller.user).map_err(|error| match error.kind() {
        io::ErrorKind::NotADirectory => in_the_way(path),
        _ => failed("cannot make the directory", path, &error),
    })?;
    describe(path, &caller.accounts).map_err(|error| failed("cannot look at", path, &error))
}

fn in_the_way(path: &Path) -> ConnectError {
    ConnectError::invalid_argument(format!(
        "path already exists but it is not a directory: {}",
        path.display()
    ))
}

fn rename(source: &Path, destination: &Path, caller: &Caller) -> Result<wire::EntryInfo, ConnectError> {
    std::fs::symlink_metadata(source).map_err(|error| failed("cannot move", source, &error))?;
    if let Some(parent) = destination.parent() {
        make_directories(parent, &caller.user).map_err(|error| match error.kind() {
            io::ErrorKind::NotADirectory => in_the_way(parent),
            _ => failed("cannot make the directory", parent, &error),
        })?;
    }
    std::fs::rename(source, destination).map_err(|error| failed("cannot move", source, &error))?;
    describe(destination, &caller.accounts).map_err(|error| failed("cannot look at", destination, &error))
}

fn list_directory(path: &Path, depth: u32, caller: &Caller) -> Result<Vec<wire::EntryInfo>, ConnectError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => {
            return Err(ConnectError::invalid_argument(format!(
                "path is not a directory: {}",
                path.display()
            )));
        }
        Err(error) => return Err(failed("cannot list", path, &error)),
    }
    list(path, depth, &caller.accounts).map_err(|error| failed("cannot list", path, &error))
}

const NO_WATCHING: &str = "watching directories is not supported yet";

impl wire::Filesystem for FilesystemRpc {
    async fn stat<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::StatRequest>,
    ) -> ServiceResult<impl Encodable<wire::StatResponse> + Send + use<'a>> {
        let caller = self.caller(&ctx)?;
        let path = self.path(request.path, &caller)?;
        let entry = blocking(move || {
            describe(&path, &caller.accounts).map_err(|error| failed("cannot look at", &path, &error))
        });
        Response::ok(wire::StatResponse { entry: entry.await?.into(), ..Default::default() })
    }

    async fn make_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<wire::MakeDirResponse> + Send + use<'a>> {
        let caller = self.caller(&ctx)?;
        let path = self.path(request.path, &caller)?;
        let entry = blocking(move || make_directory(&path, &caller)).await?;
        Response::ok(wire::MakeDirResponse { entry: entry.into(), ..Default::default() })
    }

    async fn r#move<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::MoveRequest>,
    ) -> ServiceResult<impl Encodable<wire::MoveResponse> + Send + use<'a>> {
        let caller = self.caller(&ctx)?;
        let source = self.path(request.source, &caller)?;
        let destination = self.path(request.destination, &caller)?;
        let entry = blocking(move || rename(&source, &destination, &caller)).await?;
        Response::ok(wire::MoveResponse { entry: entry.into(), ..Default::default() })
    }

    async fn list_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::ListDirRequest>,
    ) -> ServiceResult<impl Encodable<wire::ListDirResponse> + Send + use<'a>> {
        let caller = self.caller(&ctx)?;
        let path = self.path(request.path, &caller)?;
        let depth = request.depth;
        let entries = blocking(move || list_directory(&path, depth, &caller)).await?;
        Response::ok(wire::ListDirResponse { entries, ..Default::default() })
    }

    async fn remove<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::RemoveRequest>,
    ) -> ServiceResult<impl Encodable<wire::RemoveResponse> + Send + use<'a>> {
        let caller = self.caller(&ctx)?;
        let path = self.path(request.path, &caller)?;
        if path == Path::new("/") {
            return Err(ConnectError::invalid_argument("the root directory cannot be removed"));
        }
        blocking(move || {
            remove(&path).map_err(|error| {
                ConnectError::internal(format!("cannot remove '{}': {error}", path.display()))
            })
        })
        .await?;
        Response::ok(wire::RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, wire::WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<wire::WatchDirResponse> + Send + use<>>> {
        Err::<Response<ServiceStream<wire::WatchDirResponse>>, _>(ConnectError::unimplemented(NO_WATCHING))
    }

    async fn create_watcher<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, wire::CreateWatcherRequest>,
    ) -> ServiceResult<impl Encodable<wire::CreateWatcherResponse> + Send + use<'a>> {
        Err::<Response<wire::CreateWatcherResponse>, _>(ConnectError::unimplemented(NO_WATCHING))
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, wire::GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<wire::GetWatcherEventsResponse> + Send + use<'a>> {
        Err::<Response<wire::GetWatcherEventsResponse>, _>(ConnectError::unimplemented(NO_WATCHING))
    }

    async fn remove_watcher<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, wire::RemoveWatcherRequest>,
    ) -> ServiceResult<impl Encodable<wire::RemoveWatcherResponse> + Send + use<'a>> {
        Err::<Response<wire::RemoveWatcherResponse>, _>(ConnectError::unimplemented(NO_WATCHING))
    }
}
