//! What runs in the guests of `bench pause`: a program that writes to as many pages as it is told. Owns no state.

use super::super::exec;
use crate::http::Client;
use anyhow::Result;

/// Keeps memory, and writes to each page of the first megabytes of it that it is told of by one pipe; says so by another.
const WRITER: &str = r#"
import os, sys
memory = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
turn = 0
open("/tmp/ready", "w").close()
while True:
    with open("/tmp/go") as go:
        megabytes = int(go.read())
    turn = turn % 255 + 1
    for page in range(0, megabytes << 20, 4096):
        memory[page] ^= turn
    with open("/tmp/done", "w") as done:
        done.write("done")
"#;

const START: &str = r#"mkfifo /tmp/go /tmp/done
nohup python3 -c "$1" "$2" >/dev/null 2>&1 &
until [ -e /tmp/ready ]; do sleep 0.05; done"#;

/// A sandbox in which programs are run.
pub(super) struct Guest<'a> {
    pub(super) id: &'a str,
    pub(super) token: &'a str,
}

impl Guest<'_> {
    /// Runs a script and gives its output.
    pub(super) async fn run(&self, client: &mut Client, script: &str, arguments: &[&str]) -> Result<String> {
        let words = [&["-c", script, "bash"], arguments].concat();
        exec::run(client, self.id, self.token, "/bin/bash", &words).await
    }

    /// Starts the program that writes to memory of so many megabytes.
    pub(super) async fn start_writer(&self, client: &mut Client, megabytes: usize) -> Result<()> {
        self.run(client, START, &[WRITER, &megabytes.to_string()]).await.map(drop)
    }

    /// Has it write to each page of so many megabytes.
    pub(super) async fn write(&self, client: &mut Client, megabytes: usize) -> Result<()> {
        let script = r#"echo "$1" >/tmp/go; cat /tmp/done"#;
        self.run(client, script, &[&megabytes.to_string()]).await.map(drop)
    }

    /// Writes a file of so many megabytes anew.
    pub(super) async fn write_file(&self, client: &mut Client, megabytes: usize) -> Result<()> {
        let script = r#"head -c "${1}000000" /dev/urandom >~/changed"#;
        self.run(client, script, &[&megabytes.to_string()]).await.map(drop)
    }
}
