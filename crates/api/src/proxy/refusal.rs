//! The answers that the proxy gives itself. E2B's clients parse their texts: they are part of the protocol.

use crate::error::SHOULD_RETRY;
use crate::proxy::target::{Invalid, Target};
use aenv_protocol::ids::SandboxId;
use axum::Json;
use axum::body::Body;
use axum::response::{Html, IntoResponse as _};
use http::header::{ACCEPT, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use serde_json::{Value, json};

/// Why a request was not forwarded, or got no answer.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The address makes no sense.
    Invalid(Invalid),
    /// The path is for the node alone.
    Reserved(String),
    /// No such sandbox runs.
    NotFound(SandboxId),
    /// Nothing listens there.
    PortClosed(Target),
    /// The guest took the request, or did not, but gave no answer.
    Failed {
        /// Where.
        target: Target,
        /// What happened.
        reason: String,
    },
    /// Nothing moved for too long.
    Silent(Target),
    /// More requests to this sandbox are under way than are allowed.
    TooManyRequests(SandboxId),
    /// No running sandbox made this signature.
    UnknownSignature,
    /// The sandbox is paused, and traffic is not to wake it.
    Paused(SandboxId),
    /// The sandbox is just being paused, or resumed.
    Transitioning(SandboxId),
    /// The sandbox is still being resumed after the longest wait.
    Waking(SandboxId),
    /// The sandbox is paused, and the node has no room to resume it.
    Busy {
        /// Which sandbox.
        id: SandboxId,
        /// What is missing.
        reason: String,
    },
    /// The sandbox is paused and could not be resumed.
    Asleep {
        /// Which sandbox.
        id: SandboxId,
        /// What happened.
        reason: String,
    },
}

/// Who reads the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    /// A program.
    Program,
    /// A person with a browser.
    Person,
}

impl Audience {
    /// Browsers name themselves and accept HTML.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        const BROWSERS: [&str; 7] = ["mozilla", "chrome", "safari", "firefox", "edge", "opera", "msie"];
        let text = |name: HeaderName| {
            headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_ascii_lowercase()
        };
        let agent = text(USER_AGENT);
        if BROWSERS.iter().any(|browser| agent.contains(browser)) && text(ACCEPT).contains("html") {
            Self::Person
        } else {
            Self::Program
        }
    }
}

impl Refusal {
    /// The answer.
    pub(crate) fn into_response(self, audience: Audience) -> Response<Body> {
        let may_come_back = matches!(
            self,
            Self::PortClosed(_)
                | Self::Failed { .. }
                | Self::TooManyRequests(_)
                | Self::Transitioning(_)
                | Self::Waking(_)
                | Self::Busy { .. }
        );
        let comes_soon = matches!(self, Self::Transitioning(_) | Self::Waking(_) | Self::Busy { .. });
        let (status, body) = self.parts();
        let mut response = match (&body, audience) {
            (Value::String(text), _) => (status, text.clone()).into_response(),
            (_, Audience::Program) => (status, Json(&body)).into_response(),
            (_, Audience::Person) => (status, Html(page(&body))).into_response(),
        };
        if !may_come_back {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if comes_soon {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    fn parts(self) -> (StatusCode, Value) {
        let gateway = StatusCode::BAD_GATEWAY;
        let sandbox = |status: StatusCode, id: SandboxId, message: &str| {
            let body = json!({"sandboxId": id.as_str(), "message": message, "code": status.as_u16()});
            (status, body)
        };
        let port = |status: StatusCode, target: Target, message: &str| {
            let (status, mut body) = sandbox(status, target.id, message);
            body["port"] = target.port.into();
            (status, body)
        };
        match self {
            Self::Invalid(why) => (StatusCode::BAD_REQUEST, invalid_text(why).into()),
            Self::Reserved(path) => (
                StatusCode::NOT_FOUND,
                json!({
                    "message": "This endpoint is reserved for the E2B control plane and is not reachable through the \
                                sandbox URL",
                    "path": path,
                    "code": 404,
                }),
            ),
            Self::NotFound(id) => sandbox(gateway, id, "The sandbox was not found"),
            Self::PortClosed(target) => port(gateway, target, "The sandbox is running but port is not open"),
            Self::Failed { target, reason } => {
                port(gateway, target, &format!("The sandbox is running but did not answer: {reason}"))
            }
            Self::Silent(target) => port(
                StatusCode::GATEWAY_TIMEOUT,
                target,
                "The sandbox is running but nothing was sent or received for too long",
            ),
            Self::TooManyRequests(id) => sandbox(
                StatusCode::TOO_MANY_REQUESTS,
                id,
                "Too many requests to this sandbox are under way; wait for some to end",
            ),
            Self::Paused(id) => sandbox(
                StatusCode::CONFLICT,
                id,
                "The sandbox is paused: resume it (Sandbox.connect, aenv resume) before it is talked to",
            ),
            Self::Transitioning(id) => sandbox(
                StatusCode::CONFLICT,
                id,
                "The sandbox is still transitioning. Try again in a moment.",
            ),
            Self::Waking(id) => sandbox(
                StatusCode::SERVICE_UNAVAILABLE,
                id,
                "The sandbox is still being resumed. Try again in a moment.",
            ),
            Self::Busy { id, reason } => sandbox(
                StatusCode::SERVICE_UNAVAILABLE,
                id,
                &format!("The sandbox is paused and cannot be resumed now: {reason}"),
            ),
            Self::Asleep { id, reason } => {
                sandbox(gateway, id, &format!("The sandbox is paused and could not be resumed: {reason}"))
            }
            Self::UnknownSignature => (
                StatusCode::UNAUTHORIZED,
                json!({"code": 401, "message": "invalid signature: no running sandbox has a token that made it"}),
            ),
        }
    }
}

fn invalid_text(why: Invalid) -> &'static str {
    match why {
        Invalid::MissingHeader => "missing header",
        Invalid::SandboxId => "Invalid sandbox ID",
        Invalid::Port => "Invalid sandbox port",
        Invalid::Host => "Invalid host",
    }
}

/// Nothing but ids, numbers and fixed texts get here; what a guest or client wrote is escaped all the same.
fn page(body: &Value) -> String {
    let text =
        |name: &str| body[name].as_str().unwrap_or_default().replace('&', "&amp;").replace('<', "&lt;");
    format!(
        "<!doctype html><meta charset=utf-8><title>{code}</title><h1>{message}</h1><p>Sandbox {id}</p>\n",
        code = body["code"],
        message = text("message"),
        id = text("sandboxId"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_exactly_those_clients_parse() {
        let target = Target { id: "iabc".parse().unwrap(), port: 80 };
        let (status, body) = Refusal::NotFound(target.id.clone()).parts();
        assert_eq!(status, 502);
        assert_eq!(body, json!({"sandboxId": "iabc", "message": "The sandbox was not found", "code": 502}));
        let (status, body) = Refusal::PortClosed(target).parts();
        assert_eq!(status, 502);
        let message = "The sandbox is running but port is not open";
        assert_eq!(body, json!({"sandboxId": "iabc", "message": message, "port": 80, "code": 502}));
        let (status, body) = Refusal::Transitioning("iabc".parse().unwrap()).parts();
        assert_eq!(status, 409);
        let message = "The sandbox is still transitioning. Try again in a moment.";
        assert_eq!(body, json!({"sandboxId": "iabc", "message": message, "code": 409}));
    }

    #[test]
    fn only_browsers_get_a_page() {
        let audience = |agent: &'static str, accept: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(USER_AGENT, HeaderValue::from_static(agent));
            headers.insert(ACCEPT, HeaderValue::from_static(accept));
            Audience::of(&headers)
        };
        assert_eq!(audience("Mozilla/5.0", "text/html,*/*"), Audience::Person);
        assert_eq!(audience("Mozilla/5.0", "application/json"), Audience::Program);
        assert_eq!(audience("python-httpx/1", "*/*"), Audience::Program);
    }
}
