//! The control plane before a real orchestrator whose VMs and networks exist in memory only.

use aenv_api::{ApiKey, router};
use aenv_orchestrator::{
    Deadlines, DiskCopies, DiskSettings, GuestArtifacts, HostMemory, Orchestrator, Parts, Settings,
    TemplateState, import_template,
};
use aenv_testkit::{FakeHost, FakeSlots, FakeVmm};
use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower::ServiceExt as _;

pub(crate) const KEY: &str = "e2b_0123456789abcdef0123456789abcdef01234567";

/// A node without a port.
pub(crate) struct Harness {
    pub(crate) host: Arc<FakeHost>,
    pub(crate) orchestrator: Orchestrator,
    pub(crate) router: Router,
    _directory: tempfile::TempDir,
}

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl Harness {
    /// A node whose template `base` is ready; `standbys` wait to be claimed.
    pub(crate) async fn start(standbys: usize) -> Self {
        Self::start_warm(standbys, 0).await
    }

    /// As [`Self::start`], with warm standbys too.
    pub(crate) async fn start_warm(standbys: usize, warm: usize) -> Self {
        Self::start_with(|settings| (settings.standbys, settings.warm) = (standbys, warm)).await
    }

    /// As [`Self::start`], without standbys and with other settings.
    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for file in ["kernel", "initramfs", "rootfs"] {
            std::fs::write(path(file), file).unwrap();
        }
        import_template(&path("data"), "base", 2, 512, None, &path("rootfs")).unwrap();
        let host = FakeHost::new();
        let guest = GuestArtifacts { kernel: path("kernel"), initramfs: path("initramfs") };
        let mut settings = Settings {
            standbys: 0,
            warm: 0,
            min_free_bytes: 1,
            disks: DiskSettings::Reflink(DiskCopies::FullCopyAllowed),
            deadlines: Deadlines { settle: Duration::ZERO, ..Deadlines::default() },
            ..Settings::new("t", path("data"), guest, "this boot".to_owned())
        };
        change(&mut settings);
        let (standbys, warm) = (settings.standbys, settings.warm);
        let parts = Parts {
            vmm: Arc::new(FakeVmm::new(Arc::clone(&host))),
            slots: Arc::new(FakeSlots::new(Arc::clone(&host))),
            journal: None,
            memory: Arc::clone(&host) as Arc<dyn HostMemory>,
        };
        let orchestrator = Orchestrator::start(settings, parts).await.unwrap();
        let api = aenv_api::Settings {
            keys: vec![ApiKey::new(KEY).unwrap(), ApiKey::new("another-key-of-this-node").unwrap()],
            domain: Some("sandboxes.example.org".to_owned()),
            max_timeout: Duration::from_secs(24 * 3600),
        };
        let router = router(orchestrator.clone(), api);
        let harness = Self { host, orchestrator, router, _directory: directory };
        harness
            .eventually("the template is ready", || {
                let templates = harness.orchestrator.templates();
                templates
                    .iter()
                    .all(|t| t.state == TemplateState::Ready && (t.standbys, t.warm) == (standbys, warm))
            })
            .await;
        harness
    }

    /// Waits for what must happen.
    pub(crate) async fn eventually(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !condition() {
            assert!(begin.elapsed() < Duration::from_secs(20), "never: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends a request as it is.
    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        let (head, body) = self.router.clone().oneshot(request).await.unwrap().into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::String(text));
        Answer { status: head.status, headers: head.headers, body }
    }

    /// Sends a request with the key.
    pub(crate) async fn call(&self, method: &str, path: &str, body: &str) -> Answer {
        let request = Request::builder().method(method).uri(path).header("x-api-key", KEY);
        self.send(request.body(Body::from(body.to_owned())).unwrap()).await
    }

    /// Creates a sandbox and returns its id.
    pub(crate) async fn create(&self, body: &str) -> String {
        let answer = self.call("POST", "/v2/sandboxes", body).await;
        assert_eq!(answer.status, 201, "{}", answer.body);
        answer.body["sandboxID"].as_str().unwrap().to_owned()
    }

    /// Sends a request that must be refused with this status and a message that holds this word.
    pub(crate) async fn refused(
        &self,
        method: &str,
        path: &str,
        body: &str,
        status: u16,
        word: &str,
    ) -> Answer {
        let answer = self.call(method, path, body).await;
        let shown: String = body.chars().take(80).collect();
        assert_eq!(answer.status, status, "{method} {path} {shown}: {}", answer.body);
        assert_eq!(answer.body["code"], status, "{method} {path} {shown}: {}", answer.body);
        let message = answer.body["message"].as_str().unwrap();
        assert!(message.contains(word), "{method} {path} {shown}: {message}");
        answer
    }
}
