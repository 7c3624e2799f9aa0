//! Access to the files in `golden/`.

use super::{GoldenFile, GoldenFrame};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::frame::FrameView;

/// Returns the path of a golden set or of a store in it.
pub(crate) fn golden_directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// Writes golden files that do not exist yet. It panics instead of overwriting one.
pub(crate) fn write_new_files(directory: &Path, files: Vec<GoldenFile>) {
    for (name, bytes) in files {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
        let file = fs::File::options().write(true).create_new(true).open(&path);
        file.expect("golden files are never overwritten").write_all(&bytes).expect("written");
    }
}

/// Asserts that the golden files have exactly the bytes of `files`.
pub(crate) fn assert_same_files(directory: &Path, files: &[GoldenFile]) {
    for (name, bytes) in files {
        let golden = fs::read(directory.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let differs = golden.iter().zip(bytes).position(|(a, b)| a != b);
        assert_eq!((differs, golden.len()), (None, bytes.len()), "{name} differs");
    }
}

/// Reads the pages of a frame from segment 1 of a golden device directory.
pub(crate) fn read_segment_frame(device_directory: &Path, frame: &GoldenFrame) -> Vec<u8> {
    let file = fs::read(device_directory.join("segments/00000001")).expect("a segment");
    let at = frame.place.location.offset() as usize;
    file[at..at + frame.place.location.bytes() as usize].to_vec()
}

/// Asserts that the pages of a frame hold exactly its planes, and that their checksums match.
pub(crate) fn assert_planes_match(checksum: PayloadChecksum, frame: &GoldenFrame, bytes: &[u8]) {
    let view = FrameView::verify(bytes, &frame.place).expect("valid");
    let sums: Vec<u64> = view.descriptors().iter().flat_map(|d| view.checksums(d)).map(|sum| sum.get()).collect();
    assert_eq!(sums.len(), frame.planes.len());
    for (plane, sum) in frame.planes.iter().zip(sums) {
        let stored = &bytes[plane.offset..plane.offset + plane.bytes.len()];
        assert_eq!(stored, &plane.bytes[..]);
        assert_eq!(checksum.compute(&plane.identity, stored), sum);
    }
}

/// Defines the tests of a golden store: `$files` are built byte for byte, and an ignored test generates new ones.
macro_rules! golden_file_tests {
    ($directory:expr, $files:expr) => {
        #[test]
        #[ignore = "writes golden files that do not exist yet"]
        fn generate_writes_the_golden_files() {
            $crate::builder::write_new_files(&$directory, $files);
        }

        #[test]
        fn golden_files_are_built_byte_for_byte() {
            $crate::builder::assert_same_files(&$directory, &$files);
        }
    };
}
pub(crate) use golden_file_tests;
