//! What a guest cannot reach: services of the host, other sandboxes, metadata addresses; by IPv6 neither.

use aenv_e2e::shared;
use anyhow::Result;
use serde_json::json;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

/// Tries each `address port` of its arguments and prints those that accept a connection.
const PROBE: &str = r"
import socket, sys
for target in sys.argv[1:]:
    host, port = target.rsplit(',', 1)
    try:
        info = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        s = socket.socket(info[0], info[1]); s.settimeout(1.5); s.connect(info[4]); print('REACHED', target)
    except OSError as e:
        pass
print('DONE')
";

/// All addresses of this host, in all namespaces that can be named.
fn addresses(namespace: Option<&str>) -> Result<Vec<IpAddr>> {
    let mut command = Command::new("ip");
    if let Some(namespace) = namespace {
        command.args(["-n", namespace]);
    }
    let output = command.args(["-json", "address", "show", "up"]).output()?;
    let links: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let entries = links
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|link| link["addr_info"].as_array().into_iter().flatten());
    Ok(entries.filter_map(|entry| entry["local"].as_str()?.parse().ok()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reaches_neither_the_host_nor_other_sandboxes_nor_metadata() {
    let client = shared();
    let sandbox = client.create(300, &json!({})).await.unwrap();
    let neighbour = client.create(300, &json!({})).await.unwrap();
    let listener = std::net::TcpListener::bind("[::]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The listener works: the host itself reaches it by both families.
    for address in ["127.0.0.1", "::1"] {
        std::net::TcpStream::connect(SocketAddr::new(address.parse().unwrap(), port)).unwrap();
    }
    let api_port: u16 = client.address().rsplit(':').next().unwrap().parse().unwrap();

    let mut targets = Vec::new();
    for address in addresses(None).unwrap().into_iter().filter(|address| !address.is_loopback()) {
        targets.extend([format!("{address},{port}"), format!("{address},{api_port}")]);
    }
    let namespaces = Command::new("ip").args(["netns", "list"]).output().unwrap();
    for namespace in
        String::from_utf8_lossy(&namespaces.stdout).lines().filter_map(|line| line.split(' ').next())
    {
        // Namespaces of other tests come and go.
        for address in addresses(Some(namespace)).unwrap_or_default().into_iter().filter(|a| !a.is_loopback())
        {
            targets.push(format!("{address},49983"));
        }
    }
    targets.retain(|target| !target.starts_with("169.254.0.21,"));
    targets.truncate(60);
    for gateway in ["169.254.0.22", "169.254.169.254", "fe80::fc:ff:fe00:1%eth0", "fd00:ec2::254"] {
        targets.extend([format!("{gateway},{port}"), format!("{gateway},80"), format!("{gateway},22")]);
    }
    let quoted: Vec<String> = targets.iter().map(|target| format!("'{target}'")).collect();
    client
        .upload("root", &sandbox, "/srv/probe.py", bytes::Bytes::from_static(PROBE.as_bytes()))
        .await
        .unwrap();
    let found = client.run(&sandbox, &format!("python3 /srv/probe.py {}", quoted.join(" "))).await.unwrap();
    assert_eq!(found, "DONE", "of {targets:?}");

    let v6 =
        client.run(&sandbox, "ip -6 -o address show scope global; ip -6 route show default").await.unwrap();
    assert_eq!(v6, "", "a guest has no way out by IPv6");
    client.kill(&sandbox).await.unwrap();
    client.kill(&neighbour).await.unwrap();
}
