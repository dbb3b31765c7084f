//! The control interface: routes, bodies and statuses. Decides nothing; each call runs on a thread that may block.

use crate::block_service::Service;
use crate::failure::Failure;
use aenv_storage::block_service::{
    CollectGarbage, CreateDisk, CreateImage, ErrorCode, InvalidName, Name, ReleaseLayer, RewindDisk, SealDisk,
};
use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// Largest body that is read, in bytes: some thousand layers.
const MAX_BODY_BYTES: usize = 1 << 20;

type Shared = State<Arc<Service>>;

/// Nothing to tell.
#[derive(Serialize)]
struct Done {}

/// All routes.
pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/disks", get(disks).post(create_disk))
        .route("/v1/disks/{name}", get(disk).delete(delete_disk))
        .route("/v1/disks/{name}/flush", post(flush_disk))
        .route("/v1/disks/{name}/seal", post(seal_disk))
        .route("/v1/disks/{name}/rewind", post(rewind_disk))
        .route("/v1/disks/{name}/durable", post(make_disk_durable))
        .route("/v1/images", get(images).post(create_image))
        .route("/v1/images/{name}", get(image).delete(delete_image))
        .route("/v1/layers/release", post(release_layer))
        .route("/v1/gc", post(collect_garbage))
        .fallback(|| async { Failure::not_found("there is no such route") })
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(service)
}

async fn status(State(service): Shared) -> Response {
    on_thread(move || Ok(service.status()), StatusCode::OK).await
}

async fn disks(State(service): Shared) -> Response {
    on_thread(move || Ok(service.disks()), StatusCode::OK).await
}

async fn create_disk(State(service): Shared, Whole(body): Whole) -> Response {
    on_thread(move || service.create_disk(parse::<CreateDisk>(&body)?), StatusCode::CREATED).await
}

async fn disk(State(service): Shared, Named(name): Named) -> Response {
    on_thread(move || service.disk(&named(&name)?), StatusCode::OK).await
}

async fn delete_disk(State(service): Shared, Named(name): Named) -> Response {
    on_thread(move || service.delete_disk(&named(&name)?).map(|()| Done {}), StatusCode::OK).await
}

async fn flush_disk(State(service): Shared, Named(name): Named) -> Response {
    on_thread(move || service.flush_disk(&named(&name)?).map(|()| Done {}), StatusCode::OK).await
}

async fn seal_disk(State(service): Shared, Named(name): Named, Whole(body): Whole) -> Response {
    let seal = move || service.seal_disk(&named(&name)?, parse::<SealDisk>(&body)?.top);
    on_thread(seal, StatusCode::OK).await
}

async fn rewind_disk(State(service): Shared, Named(name): Named, Whole(body): Whole) -> Response {
    let rewind = move || service.rewind_disk(&named(&name)?, &parse::<RewindDisk>(&body)?.top);
    on_thread(rewind, StatusCode::OK).await
}

async fn make_disk_durable(State(service): Shared, Named(name): Named) -> Response {
    on_thread(move || service.make_disk_durable(&named(&name)?).map(|()| Done {}), StatusCode::OK).await
}

async fn images(State(service): Shared) -> Response {
    on_thread(move || Ok(service.images()), StatusCode::OK).await
}

async fn create_image(State(service): Shared, Whole(body): Whole) -> Response {
    on_thread(move || service.create_image(parse::<CreateImage>(&body)?), StatusCode::CREATED).await
}

async fn image(State(service): Shared, Named(name): Named) -> Response {
    on_thread(move || service.image(&named(&name)?), StatusCode::OK).await
}

async fn delete_image(State(service): Shared, Named(name): Named) -> Response {
    on_thread(move || service.delete_image(&named(&name)?).map(|()| Done {}), StatusCode::OK).await
}

async fn release_layer(State(service): Shared, Whole(body): Whole) -> Response {
    on_thread(move || service.release_layer(&parse::<ReleaseLayer>(&body)?), StatusCode::OK).await
}

async fn collect_garbage(State(service): Shared, Whole(body): Whole) -> Response {
    on_thread(move || service.collect_garbage(&parse::<CollectGarbage>(&body)?), StatusCode::OK).await
}

async fn wrong_method() -> Response {
    refused(StatusCode::METHOD_NOT_ALLOWED, &Failure::invalid("the route does not have this method"))
}

/// The body of a request. Refused in the form of all errors, as nobody else does.
struct Whole(Bytes);

impl<S: Send + Sync> FromRequest<S> for Whole {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let told = |rejection: BytesRejection| match rejection.status() {
            status @ StatusCode::PAYLOAD_TOO_LARGE => {
                refused(status, &Failure::invalid(format!("the body is larger than {MAX_BODY_BYTES} bytes")))
            }
            status => refused(status, &Failure::invalid(rejection.body_text())),
        };
        Bytes::from_request(request, state).await.map(Self).map_err(told)
    }
}

/// The variable part of a path.
struct Named(String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let told =
            |rejection: PathRejection| refused(rejection.status(), &Failure::invalid(rejection.body_text()));
        Path::from_request_parts(parts, state).await.map(|Path(name)| Self(name)).map_err(told)
    }
}

/// An answer of another status than the failure's code has.
fn refused(status: StatusCode, failure: &Failure) -> Response {
    (status, Json(failure.body())).into_response()
}

/// Runs to its end even when the caller goes away.
async fn on_thread<T, F>(work: F, status: StatusCode) -> Response
where
    T: Serialize + Send + 'static,
    F: FnOnce() -> Result<T, Failure> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(answer)) => (status, Json(answer)).into_response(),
        Ok(Err(failure)) => failure.into_response(),
        Err(error) => Failure::internal(format!("the request's thread ended early: {error}")).into_response(),
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body)
        .map_err(|error| Failure::invalid(format!("the body is not understood: {error}")))
}

fn named(text: &str) -> Result<Name, Failure> {
    text.parse().map_err(|error: InvalidName| Failure::invalid(error.to_string()))
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match self.code {
            ErrorCode::Invalid => StatusCode::BAD_REQUEST,
            ErrorCode::NotFound => StatusCode::NOT_FOUND,
            ErrorCode::Conflict => StatusCode::CONFLICT,
            ErrorCode::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            ErrorCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorCode::Internal => {
                tracing::error!(message = self.message, "a request failed");
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        (status, Json(self.body())).into_response()
    }
}
