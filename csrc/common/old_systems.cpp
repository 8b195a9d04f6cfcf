// Stand-ins for what a newer C or C++ library has and an older one lacks, so that a library that was linked
// here loads on systems back to glibc 2.28 and GCC 8. Newer headers and linkers ask for these in many files;
// a hidden symbol of the same name serves them within the library. Part of both libraries.
#include <new>
#include <sstream>

// Weak, so that a static C++ library, which brings its own in whole objects, is no conflict.
#define HF_FASTPATH_HIDDEN __attribute__((visibility("hidden"), weak))

extern "C" {

// glibc 2.32: whether locks may be left out. "No" is always right.
HF_FASTPATH_HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;

#if defined(__x86_64__) && defined(__GLIBC__)
// glibc 2.29: exp and log without errno. The older ones compute the same.
double old_exp(double x);
__asm__(".symver old_exp, exp@GLIBC_2.2.5");
HF_FASTPATH_HIDDEN double new_exp(double x) __asm__("exp");
double new_exp(double x) { return old_exp(x); }
double old_log(double x);
__asm__(".symver old_log, log@GLIBC_2.2.5");
HF_FASTPATH_HIDDEN double new_log(double x) __asm__("log");
double new_log(double x) { return old_log(x); }
#endif

// GCC 11: what operator new[] calls for a negative length.
HF_FASTPATH_HIDDEN void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GCC 9: string streams made without an argument.
HF_FASTPATH_HIDDEN void make_stringstream(void* self) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stringstream(void* self) { new (self) std::stringstream(std::ios_base::in | std::ios_base::out); }

HF_FASTPATH_HIDDEN void make_ostringstream(void* self) __asm__(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_ostringstream(void* self) { new (self) std::ostringstream(std::ios_base::out); }
}
