//! `pause` and `resume`, and what the other commands make of paused sandboxes, against a fake node.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use fake::{FakeNode, ID, answer, json_answer, on_terminal, sandbox};
use serde_json::{Value, json};

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// What the API tells of a paused sandbox.
fn paused() -> Value {
    let mut paused = sandbox(ID, "paused");
    paused["pauseMode"] = json!("full");
    paused["lifecycle"] = json!({"onTimeout": "pause", "autoResume": false});
    paused["saved"] = json!({
        "number": 2, "savedAt": jiff::Timestamp::now().to_string(), "mode": "full", "durability": "local",
        "tier": "hot", "memoryLayers": 3, "memoryBytes": 5 << 20, "stoppedMs": 12.34, "flushed": true,
        "pending": "the disk's seal is written out",
    });
    paused
}

#[test]
fn a_pause_sends_what_was_wished_and_says_what_it_survives() {
    let node = FakeNode::start(|_| {
        let mut done = answer(204, "");
        done.headers_mut().insert("x-aenv-durability", "local".parse().unwrap());
        done
    });
    let piped = node.run(["pause", ID]);
    assert_eq!(piped.code, Some(0), "{piped:?}");
    let expected = json!({"sandboxID": ID, "state": "paused", "pauseMode": "full", "durability": "local"});
    assert_eq!(json_of(&piped.stdout), expected);
    assert_eq!(piped.stderr, "");
    let all = ["pause", ID, "--filesystem", "--durability", "local", "--require-healthy-guest"];
    assert_eq!(json_of(&node.run(all).stdout)["pauseMode"], "filesystem");
    let bodies: Vec<Value> = node
        .asked()
        .iter()
        .map(|asked| {
            assert!(asked.is("POST", &format!("/sandboxes/{ID}/pause")), "{asked:?}");
            serde_json::from_slice(&asked.body).unwrap()
        })
        .collect();
    let wished = json!({"memory": false, "durability": "local", "requireHealthyGuest": true});
    assert_eq!(bodies, [json!({}), wished]);

    let shown = on_terminal(&node.command(["pause", ID]));
    assert!(shown.stdout.contains(&format!("paused {ID}")), "{}", shown.stdout);
    assert!(shown.stdout.contains("survives a power cut"), "{}", shown.stdout);
    let unknown = node.run(["pause", ID, "--durability", "published"]);
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
}

#[test]
fn a_resume_tells_whether_it_was_running_and_what_served_it() {
    let node = FakeNode::start(|_| {
        let mut done = json_answer(201, &sandbox(ID, "running"));
        done.headers_mut().insert("x-aenv-tier", "hot".parse().unwrap());
        done
    });
    let resumed = node.run(["resume", ID, "--timeout", "1h", "--reboot"]);
    assert_eq!(resumed.code, Some(0), "{resumed:?}");
    let expected = json!({"sandboxID": ID, "state": "running", "wasRunning": false, "tier": "hot"});
    assert_eq!(json_of(&resumed.stdout), expected);
    node.run(["resume", ID]);
    let asked = node.asked();
    assert!(asked[0].is("POST", &format!("/v2/sandboxes/{ID}/connect")));
    let body = |index: usize| serde_json::from_slice::<Value>(&asked[index].body).unwrap();
    assert_eq!(body(0), json!({"timeout": 3600, "onResume": "reboot"}));
    assert_eq!(body(1), json!({"timeout": 300}));

    let running = FakeNode::start(|_| json_answer(200, &sandbox(ID, "running")));
    let expected = json!({"sandboxID": ID, "state": "running", "wasRunning": true, "tier": null});
    assert_eq!(json_of(&running.run(["resume", ID]).stdout), expected);
    let shown = on_terminal(&running.command(["resume", ID, "--reboot"]));
    assert!(shown.stdout.contains("was running") && shown.stdout.contains("not rebooted"), "{shown:?}");
}

#[test]
fn refusals_name_the_way_out() {
    let resume_it = format!("aenv resume {ID}");
    let reboot = format!("aenv resume {ID} --reboot");
    for (arguments, status, code, hint) in [
        (vec!["pause", ID], 409, "", resume_it.as_str()),
        (vec!["pause", ID], 409, "sandbox_snapshot_guest_agent_unresponsive", "--require-healthy-guest"),
        (vec!["pause", ID], 404, "", "aenv ls"),
        (vec!["resume", ID], 409, "sandbox_no_compatible_node", reboot.as_str()),
        (vec!["resume", ID], 503, "sandbox_capacity_unavailable", "aenv rm"),
        (vec!["timeout", ID, "5m"], 409, "sandbox_paused", resume_it.as_str()),
    ] {
        let node = FakeNode::start(move |_| {
            json_answer(status, &json!({"code": status, "message": "no", "error_code": code}))
        });
        let ended = node.run(&arguments);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
        assert!(ended.stderr.starts_with("error: no\nhint: "), "{}", ended.stderr);
        assert!(ended.stderr.contains(hint), "{arguments:?} {code}: {}", ended.stderr);
    }
}

#[test]
fn whoever_needs_a_sandbox_that_runs_is_told_to_resume_it_and_nothing_wakes_it() {
    for (auto_resume, mode) in [(false, "full"), (true, "filesystem")] {
        let node = FakeNode::start(move |asked| {
            assert!(asked.path.starts_with("/sandboxes/"), "the daemon was asked: {asked:?}");
            let mut paused = paused();
            paused["pauseMode"] = json!(mode);
            paused["lifecycle"]["autoResume"] = json!(auto_resume);
            json_answer(200, &paused)
        });
        let local = "/dev/null";
        for (arguments, code) in [
            (vec!["exec", ID, "--", "true"], 125),
            (vec!["upload", ID, local, "/tmp/x"], 1),
            (vec!["download", ID, "/tmp/x", "-"], 1),
        ] {
            let ended = node.run(&arguments);
            assert_eq!(ended.code, Some(code), "{arguments:?}: {ended:?}");
            assert!(ended.stderr.contains(&format!("sandbox {ID} is paused")), "{}", ended.stderr);
            let hint = format!("hint: resume it first: aenv resume {ID}\n");
            assert!(ended.stderr.ends_with(&hint), "{arguments:?}: {}", ended.stderr);
        }
    }
}

#[test]
fn one_that_requests_wake_is_simply_asked() {
    let node = FakeNode::start(|asked| {
        if asked.path.starts_with("/sandboxes/") {
            let mut paused = paused();
            paused["lifecycle"]["autoResume"] = json!(true);
            return json_answer(200, &paused);
        }
        answer(200, "content")
    });
    let downloaded = node.run(["download", ID, "/tmp/x", "-"]);
    assert_eq!((downloaded.code, downloaded.stdout.as_str()), (Some(0), "content"), "{downloaded:?}");
}

#[test]
fn a_sandbox_that_is_paused_under_a_command_is_told_so_and_not_woken() {
    let asked_before = std::sync::atomic::AtomicBool::new(false);
    let node = FakeNode::start(move |asked| {
        if !asked.path.starts_with("/sandboxes/") {
            assert_ne!(asked.path, "/health", "a question to the daemon might wake it");
            return json_answer(502, &json!({"code": 502, "message": "The sandbox was not found"}));
        }
        match asked_before.swap(true, std::sync::atomic::Ordering::SeqCst) {
            false => json_answer(200, &sandbox(ID, "running")),
            true => json_answer(200, &paused()),
        }
    });
    let ended = node.run(["download", ID, "/tmp/x", "-"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("the sandbox was paused"), "{}", ended.stderr);
    assert!(ended.stderr.contains(&format!("aenv resume {ID}")), "{}", ended.stderr);
}

#[test]
fn a_start_says_what_becomes_of_it_in_the_end() {
    let node = FakeNode::start(|_| json_answer(201, &sandbox(ID, "running")));
    for arguments in [
        vec!["start", "--on-timeout", "pause", "--auto-resume"],
        vec!["start", "--on-timeout", "pause-filesystem"],
        vec!["start", "--on-timeout", "kill"],
    ] {
        assert_eq!(node.run(&arguments).code, Some(0), "{arguments:?}");
    }
    let wishes: Vec<Value> = node
        .asked()
        .iter()
        .map(|asked| {
            let body: Value = serde_json::from_slice(&asked.body).unwrap();
            json!([body.get("autoPause"), body.get("autoPauseMemory"), body.get("autoResume")])
        })
        .collect();
    let expected =
        [json!([true, null, {"enabled": true}]), json!([true, false, null]), json!([null, null, null])];
    assert_eq!(wishes, expected);
    let shown = on_terminal(&node.command(["start", "-d", "--on-timeout", "pause"]));
    assert!(shown.stdout.contains("is paused in 5m"), "{}", shown.stdout);

    let refused = node.run(["start", "--on-timeout", "pause-filesystem", "--auto-resume"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("--on-timeout pause\n"), "{}", refused.stderr);
    assert_eq!(node.asked().len(), 4, "nothing is asked for what cannot be");
}

#[test]
fn inspect_shows_the_saved_state() {
    let node = FakeNode::start(|_| json_answer(200, &paused()));
    let shown = on_terminal(&node.command(["inspect", ID])).stdout;
    for text in [
        "paused",
        "never; goes on by `aenv resume`",
        "number 2, full",
        "local: survives a power cut",
        "hot",
        "5.00 MiB",
        "not known",
        "12.3 ms",
        "the disk's seal is written out",
    ] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    assert!(!shown.contains("flushed"), "only what is wrong is told: {shown}");
    let piped = json_of(&node.run(["inspect", ID]).stdout);
    assert_eq!(piped["saved"]["memoryLayers"], 3);

    let silent = FakeNode::start(|_| {
        let mut silent = paused();
        silent["saved"]["flushed"] = json!(false);
        silent["saved"]["fallback"] = json!("host_restarted");
        json_answer(200, &silent)
    });
    let shown = on_terminal(&silent.command(["inspect", ID])).stdout;
    assert!(shown.contains("its daemon did not answer"), "{shown}");
    assert!(shown.contains("was lost: host_restarted"), "{shown}");
}

#[test]
fn lists_show_the_state_and_no_end_of_a_time_that_does_not_run() {
    let node = FakeNode::start(|_| json_answer(200, &json!([paused()])));
    let shown = on_terminal(&node.command(["ls"])).stdout;
    let line = shown.lines().find(|line| line.contains(ID)).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((words[2], words[4]), ("paused", "-"), "{line}");
    assert_eq!(json_of(&node.run(["ls"]).stdout)[0]["state"], "paused");
    assert!(node.asked().iter().all(|asked| asked.query.contains("paused")));
}
