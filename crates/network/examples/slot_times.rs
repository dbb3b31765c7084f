//! Prints how long slots take: making one, taking one from the pool, a connection's socket inside, removing one.
//!
//! Works in a network namespace of its own, so that it changes nothing on the host: `slot_times [count]`, as root.
#![expect(clippy::print_stdout, reason = "a measurement is printed")]

use aenv_network::{LinuxSlots, SlotSettings, Slots, purge};
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    let count = std::env::args().nth(1).map_or(Ok(100), |count| count.parse())?;
    aenv_sys::netns::run_in_new(|| tokio::runtime::Runtime::new()?.block_on(measure(count)))?
}

async fn measure(count: usize) -> Outcome {
    let record = std::env::temp_dir().join("slot-times-forwarding");
    let settings = SlotSettings {
        pool_size: 0,
        forwarding_record: record.clone(),
        ..SlotSettings::new("b9".parse()?, "100.127.0.0/16".parse()?)
    };
    let instance = settings.instance.clone();
    let slots = LinuxSlots::start(settings).await?;
    let measured = measure_slots(&slots, count).await;
    slots.shutdown().await?;
    purge(&instance, Path::new(&record)).await?;
    measured
}

async fn measure_slots(slots: &LinuxSlots, count: usize) -> Outcome {
    let (mut made, mut dialled, mut removed) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        let start = Instant::now();
        let slot = slots.acquire().await?;
        made.push(start.elapsed());
        let start = Instant::now();
        // Without IPv6 inside there is no way to anywhere, which is told at once: what remains is the way into the slot.
        if slot.dialer.connect("[2001:db8::1]:9".parse()?).await.is_ok() {
            return Err("there is a way out of a slot over IPv6".into());
        }
        dialled.push(start.elapsed());
        let start = Instant::now();
        slots.release(&slot.name).await?;
        removed.push(start.elapsed());
    }
    print("make", made);
    print("dial (no route)", dialled);
    print("remove", removed);
    Ok(())
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at =
        |part: usize| times.get((times.len() * part / 100).min(times.len() - 1)).copied().unwrap_or_default();
    println!("{what:>15}: n {} p50 {:?} p95 {:?} max {:?}", times.len(), at(50), at(95), at(100));
}
