//! Clocks after a pause of any length, hot and cold: realtime is the host's, monotonic time stood still with the guest.
//! What programs do with them is right: certificates issued meanwhile verify, what expired meanwhile is refused.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::witness::{PORT, Witness};
use aenv_e2e::{is_full, shared, shared_instance};
use aenv_testkit::client::{Client, Kept, Sandbox};
use aenv_testkit::resources::vmm_of;
use http::{Method, StatusCode};
use serde_json::json;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Most that a guest's realtime may be off.
const MOST_SKEW: f64 = 0.5;

/// Prints a key and a certificate for it that is valid from now on.
const ISSUE: &str = "cd /root && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 \
    -subj /CN=issued.example -addext subjectAltName=DNS:issued.example -keyout key.pem -out certificate.pem 2>issue.log \
    && cat key.pem certificate.pem";

/// A server with that certificate and a client that trusts it, in one process, which greet one another; then two tokens that tell
/// when they end, of which the first is over.
const CHECK: &str = r#"
import ssl, sys, time
path, over, valid = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
server.load_cert_chain(path)
client = ssl.create_default_context(cafile=path)
to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
ends = [client.wrap_bio(to_client, to_server, server_hostname="issued.example"),
        server.wrap_bio(to_server, to_client, server_side=True)]
for _ in range(10):
    for end in list(ends):
        try:
            end.do_handshake()
            ends.remove(end)
        except ssl.SSLWantReadError:
            pass
assert not ends, "no handshake"
assert over < time.time() < valid, (over, time.time(), valid)
print("verified")
"#;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// The clocks of the program in the guest, and the host's when it was asked and when it had answered, in seconds.
struct Clocks {
    asked: f64,
    answered: f64,
    realtime: f64,
    monotonic: f64,
}

impl Clocks {
    async fn ask(kept: &mut Kept, request: http::request::Builder) -> Self {
        let asked = now();
        let answer = kept.get(request).await.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        let told = answer.json();
        let clock = |name: &str| told[name].as_f64().unwrap();
        Self { asked, answered: now(), realtime: clock("realtime"), monotonic: clock("monotonic") }
    }

    /// `stopped` is how long the guest stood still at least, in seconds.
    fn check_after(&self, before: &Self, stopped: f64) {
        let skew = (self.asked - self.realtime).max(self.realtime - self.answered);
        assert!(skew <= MOST_SKEW, "realtime is off by {skew} s");
        let (passed, most) = (self.monotonic - before.monotonic, self.answered - before.asked);
        assert!(passed >= 0.0, "monotonic time went back by {} s", -passed);
        // The clock of an emulated guest may be a little fast.
        assert!(passed <= most - stopped + 1.0, "monotonic time: {passed} s of {most} s passed");
    }
}

async fn put(client: &Client, sandbox: &Sandbox, path: &str, content: String) {
    let uploaded = client.upload("root", sandbox, path, content.into()).await.unwrap();
    assert!(uploaded.status.is_success(), "{}: {}", uploaded.status, uploaded.text());
}

/// Hot and cold; the whole minute with the full extent only.
#[tokio::test]
async fn after_a_pause_of_any_length_programs_see_the_hosts_time() {
    let client = shared();
    let (instance, _) = shared_instance();
    let metadata = json!({ "metadata": { "test": "clock" } });
    let (issuer, sandbox) =
        (client.create(900, &metadata).await.unwrap(), client.create(900, &metadata).await.unwrap());
    let mut witness = Witness::start(&client, &sandbox).await.unwrap();
    put(&client, &sandbox, "/root/check.py", CHECK.to_owned()).await;
    let mut kept = client.keep().await.unwrap();
    let to_witness = || client.guest_request(&sandbox, PORT, Method::GET, "/");
    let lengths = if is_full() { [40.0, 60.0] } else { [8.0, 6.0] };
    for (tier, length) in ["hot", "cold"].into_iter().zip(lengths) {
        let before = Clocks::ask(&mut kept, to_witness()).await;
        client.pause(&sandbox, &json!({})).await.unwrap();
        let paused = now();
        if tier == "cold" {
            client.until_local(&sandbox).await.unwrap();
            let pid = vmm_of(instance, &sandbox.id).unwrap().to_string();
            assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
        }
        // Issued, and over, while it was paused.
        let (over, issued) = (now() + 1.0, client.run(&issuer, ISSUE).await.unwrap());
        tokio::time::sleep(Duration::from_secs_f64((length - (now() - paused)).max(2.0))).await;
        let stopped = now() - paused;
        assert_eq!(client.resume(&sandbox).await.unwrap(), tier);
        // The first that a program of the guest is asked after it.
        Clocks::ask(&mut kept, to_witness()).await.check_after(&before, stopped);
        put(&client, &sandbox, "/root/issued.pem", issued).await;
        let check = format!("python3 /root/check.py /root/issued.pem {over} {} 2>&1", now() + 60.0);
        assert_eq!(client.run(&sandbox, &check).await.unwrap(), "verified", "{tier}");
        witness.goes_on(&client, &sandbox).await.unwrap();
    }
    for sandbox in [&issuer, &sandbox] {
        assert!(client.kill(sandbox).await.unwrap());
    }
}
