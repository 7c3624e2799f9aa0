//! An image holds the bytes of a store; edits damage it.
//!
//! 1. [`Image::base`] makes a store on simulated devices and copies its files. The bytes are the same in every run.
//! 2. [`Edit::many`] derives edits from any bytes, so that a fuzzer can choose them.
//! 3. [`Image::edit`] applies an edit. Places out of range wrap around, so that every edit is valid.
//! 4. [`Image::simulate`] and [`Image::write`] hand the image to the engine and to kvfsck.

use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use stratakv::sim::{Geometry, Simulation};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, KvLayout, Result, Store, StoreOptions, StoredSummary, TensorView,
};
use stratakv_format::PAGE_BYTES;

/// The files of a store as bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The device, the path inside its directory, and the bytes of each file. Files are whole pages.
    pub files: Vec<(usize, String, Vec<u8>)>,
    /// The number of devices.
    pub devices: usize,
}

/// One change of an image. A file is an index into [`Image::files`], modulo their number. A place is modulo the bytes
/// in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Edit {
    /// Flips bits of a byte.
    Flip {
        /// The file.
        file: usize,
        /// The byte.
        at: usize,
        /// The mask of flipped bits.
        bits: u8,
    },
    /// Writes a number, little-endian.
    Number {
        /// The file.
        file: usize,
        /// The first byte; a multiple of 4.
        at: usize,
        /// The number.
        value: u64,
        /// How many of its bytes are written: 1, 2, 4 or 8.
        bytes: usize,
    },
    /// Copies a page over another, of the same file or of another file.
    Page {
        /// The file.
        file: usize,
        /// The page that is written.
        to: usize,
        /// The file that is read.
        from_file: usize,
        /// The page that is read.
        from: usize,
    },
    /// Zeroes a page.
    Zero {
        /// The file.
        file: usize,
        /// The page.
        page: usize,
    },
    /// Truncates a file.
    Cut {
        /// The file.
        file: usize,
        /// The pages that remain.
        pages: usize,
    },
    /// Removes a file.
    Remove {
        /// The file.
        file: usize,
    },
}

/// Numbers at the limits of integer types, lengths and page sizes.
const BORDERS: [u64; 16] = [
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    256,
    4096,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    u64::MAX / 2,
    u64::MAX,
];

impl Edit {
    /// Derives edits from any bytes, one from every eight, at most 32.
    #[must_use]
    pub fn many(bytes: &[u8]) -> Vec<Self> {
        let (chunks, _) = bytes.as_chunks::<8>();
        chunks.iter().take(32).map(|chunk| Self::from_bytes(*chunk)).collect()
    }

    fn from_bytes([kind, file, a, b, c, x, y, z]: [u8; 8]) -> Self {
        let file = usize::from(file);
        let at = usize::from(a) | usize::from(b) << 8 | usize::from(c) << 16;
        let bytes = [1, 2, 4, 8][usize::from(x) % 4];
        match kind % 16 {
            0..=2 => Self::Flip { file, at, bits: x.max(1) },
            3..=6 => Self::Number { file, at: at & !3, value: u64::from(y) | u64::from(z) << 8, bytes },
            7..=9 => Self::Number { file, at: at & !3, value: BORDERS[usize::from(y) % BORDERS.len()], bytes },
            10 | 11 => Self::Page { file, to: usize::from(a), from_file: usize::from(y), from: usize::from(z) },
            12 | 13 => Self::Zero { file, page: usize::from(a) },
            14 => Self::Cut { file, pages: usize::from(a) },
            _ => Self::Remove { file },
        }
    }
}

/// Returns the length up to the last byte that is not zero, rounded up to whole pages, and at least 1.
fn used(bytes: &[u8]) -> usize {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(1, |last| last + 1);
    end.next_multiple_of(PAGE_BYTES).min(bytes.len()).max(1)
}

impl Image {
    /// The head dim of keys and values.
    pub const HEAD_DIM: usize = 16;

    /// Returns a store of a few sequences on one device or two: grown, deleted and truncated ones. The bytes are always
    /// the same.
    ///
    /// # Panics
    /// The store cannot be made, which is a defect of the engine.
    #[must_use]
    pub fn base(devices: usize) -> Self {
        static BASES: [OnceLock<Image>; 2] = [OnceLock::new(), OnceLock::new()];
        let devices = devices.clamp(1, 2);
        BASES[devices - 1].get_or_init(|| Self::make(devices).expect("a store on simulated devices")).clone()
    }

    /// Returns the sizes of the simulated devices that hold such an image.
    #[must_use]
    pub fn geometry(devices: usize) -> Geometry {
        Geometry {
            devices,
            device_bytes: 16 << 20,
            manifest_pages: 24,
            batch_bytes: 12_000,
            whole: false,
            open_files: None,
        }
    }

    /// Returns the options to open such an image with.
    #[must_use]
    pub fn options() -> StoreOptions {
        let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize::kib(64));
        options.frame_bytes(ByteSize::kib(32))
    }

    fn make(devices: usize) -> Result<Self> {
        let simulation = Simulation::new(&Self::geometry(devices), 7);
        let store = simulation.open(Self::options())?;
        let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(Self::HEAD_DIM as u16);
        let layout = layout.group_tokens(4).dtype(DType::F16).build()?;
        for (name, tokens) in [("first", 21_usize), ("gone", 9), ("second", 40), ("cut", 30)] {
            let options = CreateOptions::new().key(name).store_summary(StoredSummary::MinMax);
            let mut sequence = store.create_sequence(&layout, options)?;
            for part in 0..3 {
                let count = tokens / 3;
                let data: Vec<f32> =
                    (0..count * Self::HEAD_DIM).map(|i| ((i * 7 + part * 3 + tokens) % 64) as f32 / 32.0).collect();
                for layer in 0..2 {
                    let view = TensorView::token_major(&data, count, 1, Self::HEAD_DIM);
                    sequence.append(layer, view, view)?;
                }
                let ids: Vec<u32> = (0..count as u32).collect();
                sequence.append_token_ids(&ids)?;
                sequence.commit_with(name.as_bytes(), Durability::Sync)?;
            }
            match name {
                "gone" => sequence.delete(Durability::Sync)?,
                "cut" => {
                    sequence.truncate(18)?;
                    sequence.commit(Durability::Sync)?;
                    sequence.close()?;
                }
                _ => sequence.close()?,
            }
        }
        store.close()?;
        let mut files = Vec::new();
        for device in 0..devices {
            let paths = simulation.files(device).into_iter();
            files
                .extend(paths.filter_map(|path| simulation.contents(device, &path).map(|bytes| (device, path, bytes))));
        }
        Ok(Self { files, devices })
    }

    /// Applies an edit. An edit without a file or place to apply to does nothing.
    pub fn edit(&mut self, edit: &Edit) {
        if self.files.is_empty() {
            return;
        }
        let count = self.files.len();
        let page_of = |files: &[(usize, String, Vec<u8>)], file: usize, page: usize| {
            let pages = used(&files[file % count].2).div_ceil(PAGE_BYTES);
            (file % count, page % pages * PAGE_BYTES)
        };
        match *edit {
            Edit::Flip { file, at, bits } => {
                let bytes = &mut self.files[file % count].2;
                let at = at % used(bytes);
                bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= bits);
            }
            Edit::Number { file, at, value, bytes: size } => {
                let bytes = &mut self.files[file % count].2;
                let at = at % used(bytes);
                let size = size.min(8);
                if let Some(field) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..size)) {
                    field.copy_from_slice(&value.to_le_bytes()[..size]);
                }
            }
            Edit::Page { file, to, from_file, from } => {
                let (from_file, from) = page_of(&self.files, from_file, from);
                let page = self.files[from_file].2.get(from..from + PAGE_BYTES).map(<[u8]>::to_vec);
                let (file, to) = page_of(&self.files, file, to);
                if let Some((page, target)) = page.zip(self.files[file].2.get_mut(to..to + PAGE_BYTES)) {
                    target.copy_from_slice(&page);
                }
            }
            Edit::Zero { file, page } => {
                let (file, at) = page_of(&self.files, file, page);
                self.files[file].2.get_mut(at..at + PAGE_BYTES).into_iter().for_each(|page| page.fill(0));
            }
            Edit::Cut { file, pages } => {
                let (file, at) = page_of(&self.files, file, pages);
                self.files[file].2.truncate(at);
            }
            Edit::Remove { file } => {
                self.files.remove(file % count);
            }
        }
    }

    /// Writes the image to simulated devices.
    #[must_use]
    pub fn simulate(&self, seed: u64) -> Simulation {
        Simulation::with_files(&Self::geometry(self.devices), seed, &self.files)
    }

    /// Writes the files below `root` and returns the device directories.
    ///
    /// # Errors
    /// A directory or file cannot be written.
    pub fn write(&self, root: &Path) -> io::Result<Vec<PathBuf>> {
        let mut directories = DirBuilder::new();
        directories.mode(0o700).recursive(true);
        let dirs: Vec<PathBuf> = (0..self.devices).map(|device| root.join(device.to_string())).collect();
        for dir in &dirs {
            directories.create(dir.join("manifest"))?;
            directories.create(dir.join("segments"))?;
        }
        for (device, name, bytes) in &self.files {
            let path = dirs[*device].join(name);
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)?;
        }
        Ok(dirs)
    }
}
