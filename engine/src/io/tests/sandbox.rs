//! Restrictions of this process, for tests that run in a child process.

/// Installs a seccomp filter that answers one system call with an error, as container runtimes do.
pub(crate) fn deny(call: libc::c_long, errno: libc::c_int) {
    let filter = [
        libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: 0x15, jt: 0, jf: 1, k: call as u32 },
        libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x0005_0000 | errno as u32 },
        libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x7fff_0000 },
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_ptr().cast_mut() };
    // SAFETY: both calls take plain arguments. The program and its filter outlive the call that copies them.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    assert!(set, "{}", std::io::Error::last_os_error());
}

/// Gives the calling thread, and threads that it starts later, another user without privileges.
pub(crate) fn become_user(uid: libc::uid_t) {
    // SAFETY: a plain system call that changes credentials of the calling thread only.
    let changed = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
    assert_eq!(changed, 0, "{}", std::io::Error::last_os_error());
}

/// Disables transparent huge pages for this process.
pub(crate) fn deny_huge_pages() {
    // SAFETY: the call takes plain arguments and affects later page faults only.
    let set = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}
