//! Reading requests: bodies with the path of what is wrong, ids, query parameters. Every refusal is a [`Failure`].

use crate::error::Failure;
use aenv_protocol::ids::SandboxId;
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use bytes::Bytes;
use http::StatusCode;
use http::request::Parts;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

/// Largest body of the control plane in bytes.
pub(crate) const MAX_BODY_BYTES: usize = 1 << 20;

/// A JSON body that must be there.
pub(crate) struct JsonBody<T>(pub(crate) T);

/// A JSON body that may be empty: then the default.
pub(crate) struct OptionalJsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Failure;
    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let bytes = read(request.into_body()).await?;
        parse(&bytes).map(Self)
    }
}

impl<T: DeserializeOwned + Default, S: Sync> FromRequest<S> for OptionalJsonBody<T> {
    type Rejection = Failure;
    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let bytes = read(request.into_body()).await?;
        if bytes.trim_ascii().is_empty() { Ok(Self(T::default())) } else { parse(&bytes).map(Self) }
    }
}

async fn read(body: Body) -> Result<Bytes, Failure> {
    match Limited::new(body, MAX_BODY_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Failure::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is larger than {MAX_BODY_BYTES} bytes"),
        )),
        Err(error) => Err(Failure::bad_request(format!("cannot read the body: {error}"))),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    if bytes.trim_ascii().is_empty() {
        return Err(Failure::bad_request("the body is empty; a JSON object is expected"));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        // Where the text is not JSON at all, the path says nothing: the line and column do.
        if inner.is_data() && path != "." {
            Failure::field(&path, inner)
        } else {
            Failure::bad_request(format!("invalid body: {inner}"))
        }
    })?;
    deserializer.end().map_err(|error| Failure::bad_request(format!("invalid body: {error}")))?;
    Ok(value)
}

/// The sandbox id of the path. What cannot be an id names no sandbox: 404, as for one that is unknown.
pub(crate) struct SandboxPath(pub(crate) SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for SandboxPath {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let segment = path_segment(parts, state).await?;
        match SandboxId::from_path(&segment) {
            Ok(id) => Ok(Self(id)),
            Err(_) => Err(Failure::no_such_sandbox(&segment.chars().take(64).collect::<String>())),
        }
    }
}

/// The one variable segment of the path, percent-decoded.
pub(crate) struct NamePath(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for NamePath {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        path_segment(parts, state).await.map(Self)
    }
}

async fn path_segment<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Failure> {
    match Path::<String>::from_request_parts(parts, state).await {
        Ok(Path(segment)) => Ok(segment),
        Err(rejection) => Err(Failure::bad_request(rejection.body_text())),
    }
}

/// Query parameters in order, decoded once. A name may occur several times.
pub(crate) struct QueryPairs(Vec<(String, String)>);

impl<S: Sync> FromRequestParts<S> for QueryPairs {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        Ok(Self::of(parts.uri.query().unwrap_or_default()))
    }
}

impl QueryPairs {
    /// Reads a query string.
    pub(crate) fn of(query: &str) -> Self {
        Self(form_urlencoded::parse(query.as_bytes()).into_owned().collect())
    }

    /// The first value of that name; an empty one counts as absent.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, value)| n == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// All values of that name that are not empty.
    pub(crate) fn all(&self, name: &'static str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(n, value)| n == name && !value.is_empty()).map(|(_, v)| v.as_str())
    }

    /// The first value of that name, even an empty one.
    pub(crate) fn raw(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The first value of that name as something else.
    ///
    /// # Errors
    /// 400 that names the parameter.
    pub(crate) fn parsed<T>(&self, name: &str) -> Result<Option<T>, Failure>
    where
        T: std::str::FromStr,
        T::Err: std::fmt::Display,
    {
        self.get(name)
            .map(|text| text.parse().map_err(|e| Failure::field(name, format!("{text:?}: {e}"))))
            .transpose()
    }
}
