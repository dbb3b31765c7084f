use super::*;
use std::path::PathBuf;

fn mapping(addresses: Range<u64>, path: &str) -> FileMapping {
    FileMapping { addresses, offset: 0, private: true, writable: true, path: PathBuf::from(path) }
}

#[test]
fn runs_are_split_into_batches_that_fit() {
    assert!(batches(&[], BATCH_BYTES).is_empty());
    let runs = [0..4096, 8192..8192 + BATCH_BYTES + 4096];
    let split = batches(&runs, BATCH_BYTES);
    assert_eq!(split.len(), 2);
    assert_eq!(split[0], [0..4096, 8192..8192 + BATCH_BYTES - 4096]);
    assert_eq!(
        split[1].as_slice(),
        std::slice::from_ref(&(8192 + BATCH_BYTES - 4096..8192 + BATCH_BYTES + 4096))
    );
}

#[test]
fn guest_memory_is_the_file_that_covers_it() {
    let shared = FileMapping { private: false, ..mapping(0..8192, "/shared") };
    let all =
        vec![mapping(0..4096, "/small"), shared, mapping(0..4096, "/memory"), mapping(4096..8192, "/memory")];
    let found = guest_memory(all.clone(), 8192).unwrap();
    assert_eq!(found, all[2..]);
    assert!(guest_memory(all, 16384).is_err());
}

#[test]
fn zero_pages_become_holes_in_a_whole_image_and_data_among_changes() {
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&[9; 5 * 4096], 0).unwrap();
    let mut content = vec![0; 4 * 4096];
    content[4096] = 1;
    let mut counts = Counts::default();
    write_run(&image, 4096, &content, Zeros::Punch, &mut counts).unwrap();
    assert_eq!(counts, Counts { changed_pages: 4, zero_pages: 3 });
    assert_eq!(data_extents(&image).unwrap(), [0..4096, 8192..12288]);
    let mut got = vec![0; 4 * 4096];
    image.read_exact_at(&mut got, 4096).unwrap();
    assert_eq!(got, content);

    let changes = tempfile::tempfile().unwrap();
    changes.set_len(8 * 4096).unwrap();
    write_run(&changes, 4096, &content, Zeros::Write, &mut counts).unwrap();
    assert_eq!(data_extents(&changes).unwrap(), vec![4096_u64..5 * 4096]);
}

/// Maps a file privately, fills pages of it, and waits for its input to end.
const WRITER: &str = "import mmap, sys
file = open(sys.argv[1], 'rb')
memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
step, page = int(sys.argv[2]), bytes(range(1, 129)) * 32
for number in range(25600):
    memory[number * step * 4096:(number * step + 1) * 4096] = page
print('written', flush=True)
sys.stdin.read()
";

/// A process with 512 MiB of memory of which every `step`th page, 100 MiB in all, was written.
fn writer(image: &Path, step: u64) -> std::process::Child {
    use std::io::BufRead as _;
    use std::process::{Command, Stdio};
    File::create(image).unwrap().set_len(512 << 20).unwrap();
    let mut command = Command::new("python3");
    command.args(["-c", WRITER]).arg(image).arg(step.to_string());
    let mut writer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    io::BufReader::new(writer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "written\n");
    writer
}

/// `AENV_TEST_DIRECTORY` is where the files are made: a data directory, to know what a pause there costs.
#[test]
#[ignore = "prints how long the capture of 100 MiB takes"]
fn times_of_a_capture() {
    let directory = std::env::var_os("AENV_TEST_DIRECTORY").map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = tempfile::tempdir_in(directory).unwrap();
    for step in [1, 4] {
        let mut writer = writer(&directory.path().join("image"), step);
        let target = directory.path().join("changes");
        for batch_bytes in [256 << 10, 1 << 20, 4 << 20, 256 << 10, 1 << 20, 4 << 20] {
            let started = Instant::now();
            write_memory(writer.id(), 512 << 20, Content::Changes, &target, batch_bytes).unwrap();
            let milliseconds = started.elapsed().as_secs_f64() * 1e3;
            println!("every {step}. page, {} KiB at once: {milliseconds:.0} ms", batch_bytes >> 10);
            std::fs::remove_file(&target).unwrap();
        }
        drop(writer.stdin.take());
        assert!(writer.wait().unwrap().success());
    }
}
