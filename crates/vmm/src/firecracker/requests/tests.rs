use super::*;

const SPEC: MachineSpec = MachineSpec { vcpus: 2, memory_mib: 256 };

fn boot(version: Version, template: &Template, limits: &RateLimits, balloon: bool) -> Vec<Request> {
    Boot {
        version,
        spec: &SPEC,
        tap: "tap0",
        guest_arguments: &["a.b=1".to_owned()],
        template,
        limits,
        balloon,
    }
    .requests()
}

fn body<'a>(requests: &'a [Request], path: &str) -> &'a Value {
    let request = requests.iter().find(|request| request.path == path);
    request.and_then(|request| request.body.as_ref()).unwrap_or_else(|| panic!("no request to {path}"))
}

#[test]
fn a_boot_configures_everything_and_starts_last() {
    let requests = boot(Version(1, 12, 1), &Template::None, &RateLimits::default(), false);
    let paths: Vec<&str> = requests.iter().map(|request| request.path.as_str()).collect();
    assert_eq!(
        paths,
        ["/machine-config", "/boot-source", "/drives/root", "/network-interfaces/eth0", "/actions"]
    );
    assert_eq!(
        body(&requests, "/machine-config"),
        &json!({"vcpu_count": 2, "mem_size_mib": 256, "smt": false, "track_dirty_pages": true})
    );
    let drive = body(&requests, "/drives/root");
    assert_eq!(
        (&drive["path_on_host"], &drive["cache_type"], &drive["is_root_device"]),
        (&json!("disk"), &json!("Writeback"), &json!(false))
    );
    assert!(drive.get("rate_limiter").is_none());
    assert_eq!(body(&requests, "/network-interfaces/eth0")["host_dev_name"], "tap0");
}

#[test]
fn a_balloon_reports_free_pages_where_the_version_knows_how() {
    let none = RateLimits::default();
    let old = boot(Version(1, 13, 1), &Template::None, &none, true);
    assert!(body(&old, "/balloon").get("free_page_reporting").is_none());
    let new = boot(Version(1, 14, 0), &Template::None, &none, true);
    assert_eq!(body(&new, "/balloon")["free_page_reporting"], true);
}

#[test]
fn templates_go_where_firecracker_wants_them() {
    let none = RateLimits::default();
    let named = boot(Version(1, 12, 0), &Template::Static("T2".to_owned()), &none, false);
    assert_eq!(body(&named, "/machine-config")["cpu_template"], "T2");
    let document = json!({"cpuid_modifiers": []});
    let custom = boot(Version(1, 12, 0), &Template::Custom(document.clone()), &none, false);
    assert_eq!(body(&custom, "/cpu-config"), &document);
    assert!(body(&custom, "/machine-config").get("cpu_template").is_none());
}

#[test]
fn a_load_speaks_the_words_of_the_version() {
    let loaded = |version| load(version, "tap7").body.unwrap();
    let old = loaded(Version(1, 12, 1));
    assert_eq!(old["enable_diff_snapshots"], true);
    assert!(old.get("track_dirty_pages").is_none());
    let new = loaded(Version(1, 13, 0));
    assert_eq!(new["track_dirty_pages"], true);
    assert!(new.get("enable_diff_snapshots").is_none());
    assert_eq!(new["resume_vm"], false);
    assert_eq!(new["mem_backend"], json!({"backend_type": "File", "backend_path": "memory"}));
    assert_eq!(new["network_overrides"], json!([{"iface_id": "eth0", "host_dev_name": "tap7"}]));
}

#[test]
fn limits_are_buckets_of_one_second_and_lifting_one_is_said() {
    let limits = RateLimits { disk_bytes: Some(1 << 20), disk_operations: None, network_bytes: None };
    let requests = boot(Version(1, 12, 1), &Template::None, &limits, false);
    let limiter = json!({
        "bandwidth": {"size": 1 << 20, "refill_time": 1000}, "ops": {"size": 0, "refill_time": 0},
    });
    assert_eq!(body(&requests, "/drives/root")["rate_limiter"], limiter);
    assert!(body(&requests, "/network-interfaces/eth0").get("rx_rate_limiter").is_none());
    let [disk, network] = limit(&limits);
    assert_eq!((disk.method, &disk.body.unwrap()["rate_limiter"]), (Method::Patch, &limiter));
    let network = network.body.unwrap();
    let unlimited = json!({"bandwidth": {"size": 0, "refill_time": 0}, "ops": {"size": 0, "refill_time": 0}});
    assert_eq!((&network["rx_rate_limiter"], &network["tx_rate_limiter"]), (&unlimited, &unlimited));
}

#[test]
fn snapshots_are_written_to_the_capture_directory() {
    let request = snapshot(Snapshot::Diff);
    let expected = json!({
        "snapshot_type": "Diff", "snapshot_path": "capture/state", "mem_file_path": "capture/memory",
    });
    assert_eq!((request.method, request.body), (Method::Put, Some(expected)));
    assert_eq!(snapshot(Snapshot::Full).body.unwrap()["snapshot_type"], "Full");
}
